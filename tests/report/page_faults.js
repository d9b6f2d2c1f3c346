const faults = [], wide = document.documentElement.clientWidth;
const visible = e => e.checkVisibility() && e.getClientRects().length;
const scrolled = e => { for (; e; e = e.parentElement) if (e.matches(".scroll, #tip")) return true; return false; };
for (const e of document.querySelectorAll("main *")) {
  if (!visible(e) || scrolled(e.parentElement)) continue;
  const box = e.getBoundingClientRect();
  if (box.right > wide + 1 || box.left < -1) faults.push(`overflow: ${e.tagName} ${e.textContent.slice(0, 40)}`);
  if (e.tagName === "text") {
    const around = e.closest(".panel").getBoundingClientRect();
    if (box.left < around.left || box.right > around.right || box.bottom > around.bottom) faults.push(`clipped: ${e.textContent}`);
  }
}
if (document.documentElement.scrollWidth > wide) faults.push("the page scrolls sideways");
const cut = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
const overlaps = (found, what) => {
  const boxes = found.filter(visible).map(e => [e.getBoundingClientRect(), e.textContent.slice(0, 30)]).filter(([box]) => box.width);
  boxes.forEach(([a, name], i) => boxes.slice(i + 1).forEach(([b, other]) => { if (cut(a, b)) faults.push(`${what}: ${name} | ${other}`); }));
};
for (const svg of document.querySelectorAll(".plot svg")) overlaps([...svg.querySelectorAll("text:not([transform*=rotate])")], "overlap");
overlaps([...document.querySelectorAll("main > :is(header, nav, section, dl)")], "parts overlap");
overlaps([...document.querySelectorAll(".panel, .gallery article, .tiles div")], "panels overlap");
const tiles = document.querySelector(".tiles");
if (tiles) {
  const area = [...tiles.children].reduce((sum, e) => sum + e.offsetWidth * e.offsetHeight, 0);
  if (area < 0.97 * tiles.clientWidth * tiles.clientHeight) faults.push("a hole in the tiles");
}
for (const e of document.querySelectorAll("img:not([alt]), section:not([aria-labelledby]), .plot:not([aria-label])")) faults.push(`unlabeled: ${e.outerHTML.slice(0, 80)}`);
for (const e of document.querySelectorAll("button, a")) if (!(e.getAttribute("aria-label") || e.textContent.trim())) faults.push("a nameless button or link");
const names = [...document.querySelectorAll("[id]")].map(e => e.id);
if (new Set(names).size < names.length) faults.push("an id stands twice");
for (const e of document.querySelectorAll('[d*="NaN"], [x*="NaN"], [y*="NaN"], [cx*="NaN"]')) faults.push(`NaN: ${e.outerHTML.slice(0, 80)}`);
const levels = [...document.querySelectorAll("h1, h2, h3, h4")].map(e => +e.tagName[1]);
if (levels[0] !== 1 || levels.lastIndexOf(1) > 0 || levels.some((level, i) => i && level > levels[i - 1] + 1)) faults.push(`headings: ${levels}`);
if (document.querySelectorAll("main").length !== 1) faults.push("landmarks");
if (document.querySelectorAll("section").length > 1 && !document.querySelector("nav[aria-label]")) faults.push("no navigation");
return faults;
