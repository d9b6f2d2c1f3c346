const plots = () => [...document.querySelectorAll(".plot")];
const tip = () => document.getElementById("tip");
const mouse = (box, x, y) => box.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: x, clientY: y }));
const press = (box, key) => box.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, key }));
const points = path => path.getAttribute("d").match(/[ML][^MLh]+/g).map(p => p.slice(1).split(",").map(Number));
const hover = (box, path, index) => {
  const bounds = box.querySelector("svg").getBoundingClientRect(), [x, y] = points(path)[index];
  mouse(box, bounds.left + x + 1, bounds.top + y);
  return tip().hidden ? null : tip().textContent;
};
const tools = box => [...box.closest(".panel").querySelectorAll(".tools button")];
const chart = name => document.querySelector(`#chart-${name} .plot`);
