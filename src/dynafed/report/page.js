(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tipBox = document.getElementById("tip");
  const hidden = new Set(); // groups that the legend switched off
  const probes = new Map(); // plot -> how to read values from it
  let axis = "round";
  let order = "main";
  let smooth = 1; // rounds that a point of a smoothed curve is the mean of

  // ---- small helpers

  const svgElement = (tag, attributes, parent, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  };
  const element = (tag, className, parent, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    parent?.append(made);
    return made;
  };
  const color = place => `--c:var(--c${place % 8})`;
  const dash = place => [undefined, "7 4", "2 4"][Math.floor(place / 8) % 3];
  const extent = values => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const known = values => values.filter(v => v !== null && v !== undefined);
  const width = text => text.length * 6.9;
  const rank = (values, share) => [...values].sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];
  /** Where an axis ends: at the highest value, but far below it if few values tower above all others. */
  const ceiling = values => {
    const high = Math.max(...values), usual = rank(values, 0.96);
    return values.length >= 12 && usual > 0 && high > 4 * usual ? usual * 1.6 : high;
  };
  /** Means over n neighbors without the lowest and the highest, so that a spike stays one. */
  const smoothed = (ys, n) => n < 2 ? ys : ys.map((v, i) => {
    const near = known(ys.slice(Math.max(0, i - (n >> 1)), i + (n >> 1) + 1)).sort((a, b) => a - b);
    const kept = near.length > 3 ? near.slice(1, -1) : near;
    return v === null ? null : kept.reduce((sum, other) => sum + other, 0) / kept.length;
  });
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return high >= 0 && x - xs[low] > xs[high] - x ? high : low;
  };

  // ---- numbers as a reader wants them

  const UNITS = { bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]], seconds: [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]] };
  const unitFor = (format, most) => {
    if (format === "percent") return { of: 0.01, name: "\u202f%" };
    const units = UNITS[format];
    if (!units) return { of: 1, name: "" };
    const [of, name] = units.find(([of]) => most >= of * (format === "seconds" && of >= 60 ? 2 : 1)) ?? units.at(-1);
    return { of, name: `\u202f${name}` };
  };
  const plain = v => {
    const size = Math.abs(v);
    if (size && (size < 1e-3 || size >= 1e7)) return v.toExponential(3).replace(/\.?0+e/, "e");
    return (+v.toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 8 });
  };
  const shown = (v, format) => {
    if (v === null || v === undefined) return "–";
    const unit = unitFor(format, Math.abs(v));
    return (format === "percent" ? (v / unit.of).toFixed(2) : unit.name ? String(+(v / unit.of).toPrecision(3)) : plain(v)) + unit.name;
  };
  const stepFor = (span, count) => {
    const rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map(m => m * power).find(step => step >= rough * 0.999);
  };

  /** Round limits and ticks of an axis; `tight` keeps the limits at the data. */
  const scaleFor = (low, high, { count, format, tight, whole, log }) => {
    if (low === high) [low, high] = tight ? [low - 0.5, high + 0.5] : [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    if (log) {
      const ends = [Math.log10(low), Math.log10(high)];
      const pad = (ends[1] - ends[0]) * 0.04;
      const marks = ends[1] - ends[0] > 2.5 ? [1] : [1, 2, 5];
      const ticks = [];
      for (let p = Math.floor(ends[0]); p <= ends[1]; p++) for (const m of marks) ticks.push(m * 10 ** p);
      const inside = ticks.filter(t => Math.log10(t) >= ends[0] - pad && Math.log10(t) <= ends[1] + pad);
      return { low: ends[0] - pad, high: ends[1] + pad, at: Math.log10, ticks: inside.map(v => ({ v, text: plain(v) })) };
    }
    const unit = unitFor(format, Math.max(Math.abs(low), Math.abs(high)));
    let step = stepFor((high - low) / unit.of, count);
    if (whole) step = Math.max(1, step);
    const [from, to] = [low / unit.of / step, high / unit.of / step];
    const [first, last] = tight ? [Math.ceil(from - 1e-9), Math.floor(to + 1e-9)] : [Math.floor(from + 1e-9), Math.ceil(to - 1e-9)];
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = first; i <= last; i++) {
      const value = i * step || 0; // never -0
      const text = digits > 4 ? plain(value) : Math.abs(value) >= 1e6 ? value.toExponential(1).replace(".0e", "e")
        : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      ticks.push({ v: value * unit.of, text: text + (value || format !== "bytes" ? unit.name : "") });
    }
    return tight ? { low, high, at: v => v, ticks } : { low: first * step * unit.of, high: last * step * unit.of, at: v => v, ticks };
  };

  /** An empty chart with its axes: returns the svg and the functions from values to pixels. */
  const frame = (box, { height, x, y, right = 14, top = 10, left, xlabel = "" }) => {
    const total = box.clientWidth;
    left ??= Math.max(30, ...y.ticks.map(tick => width(tick.text) + 8));
    const bottom = xlabel ? 42 : 30;
    const inner = { left, top, right: total - right, bottom: height - bottom };
    const svg = svgElement("svg", { viewBox: `0 0 ${total} ${height}`, "aria-hidden": "true" }, box);
    const px = v => inner.left + (x.at(v) - x.low) / (x.high - x.low) * (inner.right - inner.left);
    const py = y && (v => inner.bottom - (y.at(v) - y.low) / (y.high - y.low) * (inner.bottom - inner.top));
    for (const tick of y?.ticks ?? []) {
      svgElement("line", { class: "rule", x1: inner.left, x2: inner.right, y1: py(tick.v), y2: py(tick.v) }, svg);
      svgElement("text", { x: inner.left - 7, y: py(tick.v) + 4, "text-anchor": "end" }, svg, tick.text);
    }
    svgElement("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }, svg);
    for (const tick of x.ticks) {
      const at = px(tick.v);
      svgElement("line", { class: "axis", x1: at, x2: at, y1: inner.bottom, y2: inner.bottom + 4 }, svg);
      svgElement("text", { x: at, y: inner.bottom + 18, "text-anchor": "middle" }, svg, tick.text);
    }
    svgElement("text", { x: (inner.left + inner.right) / 2, y: inner.bottom + 35, "text-anchor": "middle" }, svg, xlabel);
    return { svg, px, py, inner };
  };

  const keys = (box, entries, shape = "") => {
    if (entries.length < 2) return;
    const list = element("ul", "keys", box);
    for (const entry of entries) {
      const item = element("li", "", list);
      item.style.cssText = color(entry.color);
      element("i", `${shape} ${entry.thin ? "thin" : ""} d${Math.floor(entry.color / 8) % 3}`, item);
      item.append(entry.name);
    }
  };

  /** An SVG path through the points; a null is a gap, and a lone point a dot. */
  const path = points => {
    let text = "", alone = false, pen = false;
    for (const point of points) {
      if (!point) {
        if (alone) text += "h0";
        pen = false;
        continue;
      }
      text += `${pen ? "L" : "M"}${point[0].toFixed(1)},${point[1].toFixed(1)}`;
      alone = !pen;
      pen = true;
    }
    return alone && pen ? `${text}h0` : text;
  };

  // ---- reading values: pointer, touch and arrow keys

  const showTip = (clientX, clientY, title, rows) => {
    tipBox.replaceChildren();
    element("strong", "", tipBox, title);
    for (const row of rows) {
      const line = element("p", "", tipBox);
      if (row.color !== undefined) element("i", "", line).style.cssText = color(row.color);
      element("span", "", line, row.name);
      element("b", "", line, row.value);
      if (row.note) element("small", "", line, row.note);
    }
    tipBox.hidden = false;
    const size = tipBox.getBoundingClientRect();
    const flip = clientX + 16 + size.width > innerWidth - 8;
    tipBox.style.left = `${Math.max(8, flip ? clientX - 16 - size.width : clientX + 16)}px`;
    tipBox.style.top = `${Math.max(8, Math.min(clientY - size.height / 2, innerHeight - size.height - 8))}px`;
  };

  /** Let a chart be read along x: `stops` are the x values, `rowsAt(i)` what stands there. */
  const readAlong = (box, { svg, px, inner }, stops, titleAt, rowsAt) => {
    const cross = svgElement("line", { class: "cross", y1: inner.top, y2: inner.bottom, visibility: "hidden" }, svg);
    const dots = svgElement("g", {}, svg);
    const places = stops.map(px);
    let current = -1;
    const go = (index, clientY) => {
      current = Math.max(0, Math.min(stops.length - 1, index));
      const x = places[current], bounds = svg.getBoundingClientRect(), zoom = bounds.width / svg.viewBox.baseVal.width;
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.setAttribute("visibility", "visible");
      const rows = rowsAt(current);
      dots.replaceChildren();
      for (const row of rows) if (row.at) svgElement("circle", { class: "dot", r: 4, cx: row.at[0], cy: row.at[1], style: color(row.color) }, dots);
      showTip(bounds.left + x * zoom, clientY ?? bounds.top + bounds.height / 3, titleAt(current), rows);
    };
    probes.set(box, {
      at: (clientX, clientY) => {
        const bounds = svg.getBoundingClientRect();
        go(nearest(places, (clientX - bounds.left) * svg.viewBox.baseVal.width / bounds.width), clientY);
      },
      step: by => go(by === -Infinity ? 0 : by === Infinity ? stops.length - 1 : current < 0 ? (by > 0 ? 0 : stops.length - 1) : current + by),
      hide: () => {
        cross.setAttribute("visibility", "hidden");
        dots.replaceChildren();
        current = -1;
      },
    });
  };

  // ---- the kinds of chart

  const AXES = { round: {}, traffic: { label: "traffic so far", format: "bytes" }, time: { label: "time so far", format: "seconds" } };

  const lines = (box, spec) => {
    const useAxis = axis !== "round" && spec.series.every(line => line.alt?.[axis]) ? axis : "round";
    const series = spec.series.filter(line => !hidden.has(line.group)).map(line => ({ ...line, x: useAxis === "round" ? line.x : line.alt[useAxis] }));
    const ys = known(series.flatMap(line => [...line.y, ...(line.low ?? []), ...(line.high ?? []), ...(spec.marks ?? []).map(mark => mark.y)]));
    const curves = series.map(line => ({ ...line, y: spec.xlabel === "round" && !spec.small ? smoothed(line.y, smooth) : line.y }));
    if (!ys.length) return void element("p", "hint", box, "nothing to draw");
    const grouped = spec.series[0].group !== undefined;
    if (!grouped) keys(box, series);
    let [low, high] = extent(ys);
    if (spec.format === "percent") [low, high] = [Math.max(0, low), Math.min(1, high)];
    const sorted = [...ys].sort((a, b) => a - b);
    const log = spec.log === "auto" && low > 0 && ceiling(ys) / sorted[sorted.length >> 1] > 25;
    if (spec.ymax) high = Math.max(spec.ymax, low);
    else if (!log && low >= 0 && spec.format !== "percent") high = ceiling(ys);
    if (!log && low > 0 && (spec.zero || low < 0.35 * high)) low = 0;
    const height = spec.small ? 180 : grouped ? Math.round(Math.max(250, Math.min(380, box.clientWidth * 0.4))) : 290;
    const [first, last] = extent(known(series.flatMap(line => line.x)));
    const labels = spec.direct && grouped && series.length > 1 && series.length <= 10 && box.clientWidth > 700 && series.every(line => line.name.length <= 32);
    const right = labels ? Math.max(...series.map(line => width(line.name))) + 22 : 14;
    const x = scaleFor(useAxis === "round" ? first : Math.min(first, 0), last, {
      count: Math.max(2, (box.clientWidth - right) / (spec.small ? 70 : 90)), tight: true,
      whole: useAxis === "round" && known(spec.series.flatMap(line => line.x)).every(Number.isInteger), format: AXES[useAxis].format,
    });
    const y = scaleFor(low, high, { count: spec.small ? 3 : 5, format: spec.format, log });
    const area = frame(box, { height, x, y, right, xlabel: AXES[useAxis].label ?? spec.xlabel ?? "" });
    const { svg, px, inner } = area;
    const py = v => Math.max(inner.top - 2, area.py(v)); // what is beyond the axis is cut off at its end
    if (log) svgElement("text", { x: inner.right, y: inner.top + 4, "text-anchor": "end" }, svg, "log scale");
    for (const mark of useAxis === "round" ? spec.xmarks ?? [] : []) {
      if (grouped && mark.groups.every(group => hidden.has(group)) || mark.x < first || mark.x > last) continue;
      svgElement("line", { class: "mark", x1: px(mark.x), x2: px(mark.x), y1: inner.top, y2: inner.bottom }, svg);
      const left = px(mark.x) + width(mark.label) + 8 > inner.right;
      svgElement("text", { class: "halo", x: px(mark.x) + (left ? -5 : 5), y: spec.better === "lower" ? inner.top + 8 : inner.bottom - 7, "text-anchor": left ? "end" : "start" }, svg, mark.label);
    }
    for (const mark of spec.marks ?? []) {
      svgElement("line", { class: "mark", x1: inner.left, x2: inner.right, y1: py(mark.y), y2: py(mark.y) }, svg);
    }
    for (const line of series) {
      if (!line.low) continue;
      const at = line.x.map((v, i) => [px(v), py(Math.max(line.low[i], log ? low : -Infinity)), py(line.high[i])]);
      const edge = [...at.map(p => [p[0], p[2]]), ...at.reverse().map(p => [p[0], p[1]])];
      svgElement("path", { class: "band", style: color(line.color), d: `${path(edge)}Z` }, svg);
    }
    const beyond = series.flatMap(line => line.y.map((v, i) => [line.x[i], v, line.color])).filter(p => p[1] !== null && y.at(p[1]) > y.high + 1e-9);
    if (smooth > 1) for (const line of series.filter((line, i) => curves[i].y !== line.y)) {
      svgElement("path", { class: "line raw", style: color(line.color), d: path(line.y.map((v, i) => v === null || line.x[i] === null || (log && v <= 0) ? null : [px(line.x[i]), py(v)])) }, svg);
    }
    for (const line of [...curves].reverse()) {
      const style = { style: color(line.color), "stroke-dasharray": dash(line.color) };
      const points = line.y.map((v, i) => v === null || line.x[i] === null || (log && v <= 0) ? null : [px(line.x[i]), py(v)]);
      // Where some seeds are missing the mean may jump: dotted, so that nobody takes it for learning.
      const whole = points.map((p, i) => !line.n || line.n[i] === line.of ? p : null);
      const partial = points.map((p, i) => line.n && (line.n[i] !== line.of || (line.n[i + 1] ?? line.of) !== line.of) ? p : null);
      svgElement("path", { class: `line${line.thin ? " thin" : ""}`, ...style, d: path(whole) }, svg);
      if (partial.some(Boolean)) svgElement("path", { class: "line partial", style: style.style, d: path(partial) }, svg);
      if (known(points).length <= 15) for (const p of known(points)) svgElement("circle", { class: "dot", r: line.thin ? 2.5 : 3.5, cx: p[0], cy: p[1], style: style.style }, svg);
    }
    for (const mark of spec.marks ?? []) {
      svgElement("text", { class: "halo", x: inner.left + 6, y: py(mark.y) - 5 }, svg, mark.label);
    }
    let labeled = -Infinity; // where the last label is: they mustn't overlap
    for (const [at, v, place] of beyond.sort((a, b) => a[0] - b[0])) {
      svgElement("path", { class: "fill", style: color(place), d: `M${(px(at) - 4).toFixed(1)},${inner.top + 5}h8l-4,-7z` }, svg);
      if (px(at) > labeled + 70) svgElement("text", { class: "halo", x: px(at) + (px(at) > inner.right - 70 ? -8 : 8), y: inner.top + 6, "text-anchor": px(at) > inner.right - 70 ? "end" : "start" }, svg, shown(v, spec.format));
      if (px(at) > labeled + 70) labeled = px(at);
    }
    for (const point of spec.points ?? []) {
      const at = [px(point.x), py(point.y)], room = width(point.label) / 2;
      svgElement("circle", { class: "dot", r: 4.5, cx: at[0], cy: at[1], style: color(0) }, svg);
      svgElement("text", { class: "name halo", "text-anchor": "middle", x: Math.min(inner.right - room, Math.max(inner.left + room + 4, at[0])), y: at[1] < inner.top + 14 ? at[1] + 20 : at[1] - 10 }, svg, point.label);
    }
    if (labels) {
      const ends = series.map(line => ({ line, y: py(known(line.y).at(-1)), x: px(line.x.at(-1)) })).sort((a, b) => a.y - b.y);
      ends.forEach((end, i) => { end.at = Math.max(end.y, i ? ends[i - 1].at + 15 : -Infinity); });
      for (let i = ends.length - 1, limit = inner.bottom; i >= 0; i--, limit -= 15) {
        ends[i].at = Math.min(ends[i].at, limit, ends[i + 1] ? ends[i + 1].at - 15 : Infinity);
      }
      for (const end of ends) if (!isNaN(end.at)) svgElement("text", { class: "direct", x: inner.right + 10, y: end.at + 4, style: color(end.line.color) }, svg, end.line.name);
    }
    const stops = [...new Set(known(series.flatMap(line => line.x)))].sort((a, b) => a - b);
    const shared = useAxis === "round";
    readAlong(box, area, stops,
      i => shared ? `${spec.xlabel || "x"} ${plain(stops[i])}` : shown(stops[i], AXES[useAxis].format),
      i => series.flatMap(line => {
        const j = nearest(line.x, stops[i]);
        if (shared ? line.x[j] !== stops[i] : stops[i] > line.x.at(-1)) return [];
        const v = line.y[j];
        const note = line.low && line.n[j] > 1 ? `${shown(line.low[j], spec.format)} … ${shown(line.high[j], spec.format)}` : "";
        const few = line.n && line.n[j] < line.of ? ` (${line.n[j]} of ${line.of} seeds)` : "";
        return [{ name: line.name + few + (shared ? "" : `, round ${spec.series.find(s => s.name === line.name).x[j]}`), value: shown(v, spec.format), note,
          color: line.color, v, at: v === null || (log && v <= 0) ? undefined : [px(line.x[j]), py(v)] }];
      }).sort((a, b) => b.v - a.v));
  };

  const stack = (box, spec) => {
    keys(box, spec.series, "box");
    const xs = spec.x, gap = xs.length > 1 ? Math.min(...xs.slice(1).map((v, i) => v - xs[i])) : 1;
    const sums = xs.map((_, i) => spec.series.reduce((sum, part) => sum + part.y[i], 0));
    const x = scaleFor(xs[0] - gap / 2, xs.at(-1) + gap / 2, { count: box.clientWidth / 90, tight: true, whole: true });
    const most = ceiling(sums) || 1;
    const y = scaleFor(0, most, { count: 5, format: spec.format });
    const area = frame(box, { height: 290, x, y, xlabel: spec.xlabel });
    const base = xs.map(() => 0);
    for (const part of spec.series) {
      const top = [], bottom = [];
      xs.forEach((v, i) => {
        const ends = [area.px(v - gap / 2), area.px(v + gap / 2)];
        bottom.push([ends[0], area.py(base[i])], [ends[1], area.py(base[i])]);
        base[i] = Math.min(y.high, base[i] + part.y[i]);
        top.push([ends[0], area.py(base[i])], [ends[1], area.py(base[i])]);
      });
      svgElement("path", { class: "area", style: color(part.color), d: `${path([...top, ...bottom.reverse()])}Z` }, area.svg);
    }
    const above = xs.flatMap((v, i) => sums[i] > y.high ? [[v, sums[i]]] : []);
    for (const [at, v] of above) {
      svgElement("path", { class: "frame", d: `M${area.px(at).toFixed(1)},${area.inner.top - 8}l4,7h-8z` }, area.svg);
      const end = area.px(at) > area.inner.right - 70;
      if (above.length < 4) svgElement("text", { class: "halo", x: area.px(at) + (end ? -8 : 8), y: area.inner.top, "text-anchor": end ? "end" : "start" }, area.svg, shown(v, spec.format));
    }
    readAlong(box, area, xs, i => `${spec.xlabel} ${xs[i]}: ${shown(sums[i], spec.format)}`,
      i => spec.series.map(part => ({ name: part.name, value: shown(part.y[i], spec.format), color: part.color })).reverse());
  };

  const bars = (box, spec) => {
    const place = (part, i) => part.color ?? i;
    keys(box, spec.series.map((part, i) => ({ ...part, color: place(part, i) })), "box");
    const n = spec.labels.length, values = known(spec.series.flatMap(part => part.y));
    const [low, high] = extent([0, ...values, spec.ymax ?? 0]);
    const y = scaleFor(low, high, { count: 4, format: spec.format });
    const longest = Math.max(0, ...spec.labels.map(width));
    const turned = longest + 8 > (box.clientWidth - 50) / n && longest > 30;
    const area = frame(box, { height: 250, x: { low: -0.5, high: n - 0.5, at: v => v, ticks: [] }, y, xlabel: "" });
    const { svg, px, py, inner } = area;
    const slot = (inner.right - inner.left) / Math.max(1, n), wide = Math.min(46, slot * 0.8 / spec.series.length);
    spec.series.forEach((part, s) => {
      let d = "";
      part.y.forEach((v, i) => {
        if (v !== null) d += `M${(px(i) + (s - spec.series.length / 2) * wide).toFixed(1)},${py(0).toFixed(1)}v${(py(v) - py(0)).toFixed(1)}h${(wide * 0.92).toFixed(1)}V${py(0).toFixed(1)}z`;
      });
      svgElement("path", { class: "fill", style: color(place(part, s)), d }, svg);
    });
    const every = Math.ceil(turned ? 15 / slot : (longest + 8) / slot);
    const deep = turned ? Math.min(90, longest * 0.64 + 4) : 0;
    spec.labels.forEach((label, i) => {
      if (i % every) return;
      const most = turned ? Math.min(22, Math.floor((px(i) + 8) / 0.77 / 6.9)) : Infinity; // none reaches beyond the left edge
      const text = label.length > most ? `${label.slice(0, Math.max(1, most - 1))}…` : label, at = `${px(i).toFixed(1)} ${inner.bottom + (turned ? 12 : 18)}`;
      svgElement("text", { transform: `translate(${at})${turned ? " rotate(-40)" : ""}`, "text-anchor": turned ? "end" : "middle" }, svg, text);
    });
    svgElement("text", { x: inner.right, y: inner.bottom + 34 + deep, "text-anchor": "end" }, svg, spec.xlabel);
    svg.setAttribute("viewBox", `0 0 ${box.clientWidth} ${250 + deep + (spec.xlabel ? 14 : 0)}`);
    readAlong(box, area, spec.labels.map((_, i) => i), i => spec.labels[i],
      i => spec.series.map((part, s) => ({ name: part.name, value: shown(part.y[i], spec.format), color: place(part, s) })));
  };

  const heat = (box, spec) => {
    const totals = spec.counts.map(row => row.reduce((sum, v) => sum + v, 0));
    const main = spec.counts.map(row => row.indexOf(Math.max(...row)));
    const share = i => totals[i] ? spec.counts[i][main[i]] / totals[i] : 0;
    const clients = spec.shown.map((_, i) => i);
    if (order === "main") clients.sort((a, b) => main[a] - main[b] || share(b) - share(a) || a - b);
    const names = spec.names.length ? spec.names : Array.from({ length: spec.classes }, (_, c) => String(c));
    const total = box.clientWidth;
    const left = Math.max(58, Math.max(...names.map(width)) + 12);
    const cellWide = Math.min(60, (total - left - 4) / clients.length);
    const cellHigh = Math.max(spec.small ? 2 : 4, Math.min(spec.small ? 12 : 18, (spec.small ? 200 : 420) / spec.classes));
    const uneven = new Set(totals).size > 1;
    const top = uneven ? 46 : 6, bottom = top + cellHigh * spec.classes, right = left + cellWide * clients.length;
    const svg = svgElement("svg", { viewBox: `0 0 ${total} ${bottom + 28}`, "aria-hidden": "true" }, box);
    const gap = Math.min(cellWide, cellHigh) >= 6 ? 1 : 0;
    if (uneven) {
      const most = Math.max(...totals);
      const d = clients.map((i, x) => `M${(left + x * cellWide).toFixed(2)},40h${(cellWide - gap).toFixed(2)}v${(-34 * totals[i] / most).toFixed(2)}h${(gap - cellWide).toFixed(2)}z`).join("");
      svgElement("path", { class: "size", d }, svg);
      svgElement("text", { x: left - 8, y: 40, "text-anchor": "end" }, svg, "samples");
    }
    svgElement("rect", { class: "frame", x: left - .5, y: top - .5, width: right - left + 1 - gap, height: bottom - top + 1 - gap }, svg);
    const levels = Array.from({ length: 12 }, () => "");
    clients.forEach((i, x) => spec.counts[i].forEach((count, c) => {
      if (count) levels[Math.min(11, Math.floor(Math.sqrt(count / totals[i]) * 12))] += `M${(left + x * cellWide).toFixed(2)},${(top + c * cellHigh).toFixed(2)}h${(cellWide - gap).toFixed(2)}v${(cellHigh - gap).toFixed(2)}h${(gap - cellWide).toFixed(2)}z`;
    }));
    levels.forEach((d, level) => d && svgElement("path", { class: "heat", "fill-opacity": ((level + 1) / 12).toFixed(3), d }, svg));
    const every = [1, 2, 5, 10, 20, 50].find(n => n * cellHigh >= 13) ?? 100;
    names.forEach((name, c) => c % every || svgElement("text", { x: left - 8, y: top + (c + .5) * cellHigh + 4, "text-anchor": "end" }, svg, spec.names.length || c ? name : `class ${name}`));
    const sample = order === "main" ? "each column a client, ordered by main class" : "each column a client, by number";
    svgElement("text", { x: left, y: bottom + 18 }, svg, width(sample) < total - left ? sample : "each column a client");
    const pick = svgElement("rect", { class: "pick", width: cellWide, height: cellHigh, visibility: "hidden" }, svg);
    let current = [-1, 0];
    const go = (x, c) => {
      current = [Math.max(0, Math.min(clients.length - 1, x)), Math.max(0, Math.min(spec.classes - 1, c))];
      const i = clients[current[0]], at = [left + current[0] * cellWide, top + current[1] * cellHigh];
      pick.setAttribute("x", at[0] - gap / 2);
      pick.setAttribute("y", at[1] - gap / 2);
      pick.setAttribute("visibility", "visible");
      const count = spec.counts[i][current[1]], bounds = svg.getBoundingClientRect(), zoom = bounds.width / total;
      const name = spec.names.length ? names[current[1]] : `class ${names[current[1]]}`;
      showTip(bounds.left + (at[0] + cellWide) * zoom, bounds.top + at[1] * zoom, `client ${spec.shown[i]}`, [
        { name, value: `${plain(count)} of ${plain(totals[i])}${totals[i] ? ` (${(100 * count / totals[i]).toFixed(1)}\u202f%)` : ""}` },
        { name: "classes it holds", value: `${spec.counts[i].filter(Boolean).length}` },
      ]);
    };
    probes.set(box, {
      at: (clientX, clientY) => {
        const bounds = svg.getBoundingClientRect(), zoom = total / bounds.width;
        const x = ((clientX - bounds.left) * zoom - left) / cellWide, c = ((clientY - bounds.top) * zoom - top) / cellHigh;
        if (x >= 0 && x < clients.length && c >= (uneven ? -46 / cellHigh : 0) && c < spec.classes) go(Math.floor(x), Math.floor(c));
        else hide();
      },
      step: by => {
        const x = Math.max(0, Math.min(clients.length - 1, current[0] + by));
        go(x, main[clients[x]]);
      },
      hide: () => { pick.setAttribute("visibility", "hidden"); current = [-1, 0]; },
    });
  };

  const events = (box, spec) => {
    const rowHigh = 30, height = spec.rows.length * rowHigh + 46;
    const x = scaleFor(spec.ends[0] - .5, spec.ends[1] + .5, { count: box.clientWidth / 90, tight: true, whole: true });
    const area = frame(box, { height, x, xlabel: spec.xlabel, left: 76, top: 4 });
    const { svg, px, inner } = area;
    spec.rows.forEach((row, r) => {
      const bottom = inner.top + (r + 1) * rowHigh - 4, most = Math.max(...row.n);
      svgElement("text", { class: "name", x: inner.left - 10, y: bottom - 6, "text-anchor": "end" }, svg, row.name);
      svgElement("line", { class: "rule", x1: inner.left, x2: inner.right, y1: bottom, y2: bottom }, svg);
      const thick = Math.max(1.5, Math.min(8, (px(spec.ends[0] + 1) - px(spec.ends[0])) * .7));
      const d = row.x.map((v, i) => `M${px(v).toFixed(1)},${bottom}v${(-8 - 14 * row.n[i] / most).toFixed(1)}`).join("");
      svgElement("path", { d, style: `${color(row.color)};stroke:var(--c);stroke-width:${thick.toFixed(1)}` }, svg);
    });
    const stops = [...new Set(spec.rows.flatMap(row => row.x))].sort((a, b) => a - b);
    readAlong(box, area, stops, i => `${spec.xlabel} ${stops[i]}`,
      i => spec.rows.flatMap(row => row.x.includes(stops[i]) ? [{ name: row.name, value: String(row.n[row.x.indexOf(stops[i])]), color: row.color }] : []));
  };

  // ---- bring it to life

  const kinds = { lines, stack, bars, heat, events };
  const plots = new Set();
  const drawnAt = new Map();
  const hide = () => {
    tipBox.hidden = true;
    for (const probe of probes.values()) probe.hide();
  };
  const draw = box => {
    drawnAt.set(box, box.clientWidth);
    if (!box.clientWidth) return; // inside a closed <details>: drawn when it opens
    box.replaceChildren();
    probes.delete(box);
    const spec = data.charts[box.dataset.chart];
    kinds[spec.kind](box, spec);
  };
  const drawAll = () => { hide(); plots.forEach(draw); };
  const resized = new ResizeObserver(entries => {
    for (const { target } of entries) if (target.clientWidth !== drawnAt.get(target)) draw(target);
  });

  const listen = box => {
    for (const type of ["pointermove", "mousemove", "pointerdown"]) box.addEventListener(type, event => probes.get(box)?.at(event.clientX, event.clientY));
    for (const type of ["pointerleave", "mouseleave", "blur"]) box.addEventListener(type, hide);
    box.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (by === undefined || !probes.has(box)) return;
      event.preventDefault();
      probes.get(box).step(by);
    });
  };

  const switches = { axis: value => { axis = value; }, order: value => { order = value; }, smooth: value => { smooth = +value; } };
  const markSwitches = () => {
    const now = { axis, order, smooth: String(smooth) };
    for (const name of Object.keys(switches)) {
      for (const button of document.querySelectorAll(`[data-${name}]`)) button.setAttribute("aria-pressed", button.dataset[name] === now[name]);
    }
  };
  document.addEventListener("click", event => {
    for (const [name, use] of Object.entries(switches)) {
      const button = event.target.closest(`[data-${name}]`);
      if (!button) continue;
      use(button.dataset[name]);
      markSwitches();
      drawAll();
    }
  });

  // ---- behind every chart: its numbers as a table, as CSV, and the drawing as SVG

  const KINDS = {
    lines: spec => {
      const xs = [...new Set(spec.series.flatMap(line => line.x))].sort((a, b) => a - b);
      const at = spec.series.map(line => new Map(line.x.map((x, i) => [x, i])));
      const columns = spec.series.flatMap(line => [line.name, ...(line.low ? [`${line.name}, low`, `${line.name}, high`] : [])]);
      return [[spec.xlabel || "x", ...columns], ...xs.map(x => [x, ...spec.series.flatMap((line, s) => {
        const i = at[s].get(x);
        return [line.y[i], ...(line.low ? [line.low[i], line.high[i]] : [])];
      })])];
    },
    stack: spec => [[spec.xlabel, ...spec.series.map(part => part.name)], ...spec.x.map((x, i) => [x, ...spec.series.map(part => part.y[i])])],
    bars: spec => [[spec.xlabel || "label", ...spec.series.map(part => part.name)], ...spec.labels.map((label, i) => [label, ...spec.series.map(part => part.y[i])])],
    heat: spec => [["client", ...Array.from({ length: spec.classes }, (_, c) => spec.names[c] ?? `class ${c}`)], ...spec.shown.map((client, i) => [client, ...spec.counts[i]])],
    events: spec => [[spec.xlabel, "event", "count"], ...spec.rows.flatMap(row => row.x.map((x, i) => [x, row.name, row.n[i]]))],
  };
  const rowsOf = spec => KINDS[spec.kind](spec);
  const csv = rows => rows.map(row => row.map(v => {
    const text = String(v ?? "");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",")).join("\r\n") + "\r\n";
  const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "font-family", "font-size", "font-weight", "paint-order", "opacity"];
  const drawing = box => {
    const svg = box.querySelector("svg"), copy = svg.cloneNode(true), all = [...copy.querySelectorAll("*")];
    [...svg.querySelectorAll("*")].forEach((part, i) => {
      const style = getComputedStyle(part);
      all[i].setAttribute("style", STYLES.map(name => `${name}:${style.getPropertyValue(name)}`).join(";").replaceAll('"', "'"));
      all[i].removeAttribute("class");
    });
    const { width: wide, height: high } = svg.viewBox.baseVal;
    for (const [name, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", width: wide, height: high })) copy.setAttribute(name, value);
    copy.removeAttribute("aria-hidden");
    copy.prepend(svgElement("rect", { width: wide, height: high, fill: getComputedStyle(box.closest(".panel")).backgroundColor }));
    const title = svgElement("title", {}, null, box.getAttribute("aria-label"));
    copy.prepend(title);
    return new XMLSerializer().serializeToString(copy);
  };
  const save = (name, type, text) => {
    const link = element("a", "");
    link.href = `data:${type};charset=utf-8,${encodeURIComponent(text)}`;
    link.download = name;
    link.click();
  };
  const fill = (place, rows) => {
    const scroll = element("div", "scroll", place);
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "numbers of the chart");
    const table = element("table", "", scroll), [head, ...body] = rows;
    const top = element("tr", "", element("thead", "", table));
    for (const name of head) element("th", "num", top, name).scope = "col";
    const inside = element("tbody", "", table);
    for (const row of body) {
      const line = element("tr", "", inside);
      for (const v of row) element("td", "num", line, v === null || v === undefined ? "–" : String(v));
    }
  };
  const addTools = box => {
    const panel = box.closest(".panel"), spec = () => data.charts[box.dataset.chart], { title } = spec();
    const tools = element("p", "tools", panel);
    const tool = (text, label, use) => {
      const button = element("button", "", tools, text);
      button.type = "button";
      button.setAttribute("aria-label", `${title}: ${label}`);
      button.addEventListener("click", () => use(button));
      return button;
    };
    tool("table", "show the numbers as a table", button => {
      const open = panel.querySelector(".behind");
      button.setAttribute("aria-expanded", !open);
      if (open) open.remove(); else fill(element("div", "behind", panel), rowsOf(spec()));
    }).setAttribute("aria-expanded", false);
    tool("CSV", "download the numbers as CSV", () => save(`${panel.id}.csv`, "text/csv", csv(rowsOf(spec()))));
    tool("SVG", "download the drawing as SVG", () => box.querySelector("svg") && save(`${panel.id}.svg`, "image/svg+xml", drawing(box)));
  };
  const enliven = box => {
    plots.add(box);
    draw(box);
    resized.observe(box);
    listen(box);
    addTools(box);
  };
  document.querySelectorAll("[data-chart]").forEach(enliven);

  const legend = () => [...document.querySelectorAll(".key")];
  const markLegend = () => legend().forEach(key => key.setAttribute("aria-pressed", !hidden.has(+key.dataset.group)));
  const pick = (event, use) => {
    const key = event.target.closest(".key");
    if (!key) return;
    use(+key.dataset.group);
    markLegend();
    drawAll();
  };
  document.addEventListener("click", event => pick(event, group => { if (!hidden.delete(group)) hidden.add(group); }));
  document.addEventListener("dblclick", event => pick(event, group => {
    const others = legend().map(other => +other.dataset.group).filter(other => other !== group);
    const alone = others.every(other => hidden.has(other));
    hidden.clear();
    if (!alone) others.forEach(other => hidden.add(other));
  }));

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.querySelectorAll("thead th")], body = table.tBodies[0];
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "descending" || (!head.hasAttribute("aria-sort") && !head.classList.contains("num"));
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const value = row => row.cells[column].dataset.v;
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === ""); // what is missing stays at the end
        const by = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", { numeric: true }) : x - y;
        return down ? by : -by;
      };
      body.append(...[...body.rows].sort(compare));
    }));
  }

  document.querySelector("details.numbers")?.addEventListener("toggle", event => {
    const place = event.currentTarget;
    if (!place.open || place.querySelector("table")) return;
    fill(place, [data.numbers.columns, ...data.numbers.rows]);
  });

  // ---- a page that is still being written to

  /** Show the page's new state. What the reader has opened, chosen or is reading stays as it is. */
  globalThis.updatePage = ({ title, html, charts }) => {
    const main = document.querySelector("main"), fresh = document.createElement("template");
    const focused = document.activeElement?.closest("[data-chart]");
    fresh.innerHTML = html;
    document.title = title;
    const open = new Set([...main.querySelectorAll("details[open] > summary")].map(summary => summary.textContent));
    for (const summary of fresh.content.querySelectorAll("details > summary")) summary.parentElement.open = open.has(summary.textContent);
    const changed = [];
    for (const figure of fresh.content.querySelectorAll("figure.panel[id]")) {
      const place = figure.querySelector("[data-chart]"), old = document.getElementById(figure.id), box = old?.querySelector("[data-chart]");
      if (!box) continue;
      if (JSON.stringify(data.charts[box.dataset.chart]) !== JSON.stringify(charts[place.dataset.chart])) changed.push(box);
      box.dataset.chart = place.dataset.chart;
      box.setAttribute("aria-label", place.getAttribute("aria-label"));
      old.querySelector("figcaption").replaceWith(figure.querySelector("figcaption"));
      figure.replaceWith(old);
    }
    data.charts = charts;
    main.replaceChildren(fresh.content);
    for (const box of plots) if (!box.isConnected) { plots.delete(box); resized.unobserve(box); }
    if (changed.length) hide();
    changed.forEach(draw);
    for (const box of document.querySelectorAll("[data-chart]")) if (!plots.has(box)) enliven(box);
    markSwitches();
    markLegend();
    focused?.focus({ preventScroll: true });
  };
})();
