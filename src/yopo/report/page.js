"use strict";
// Legend: a curve is shown while both its run and its measure are on, in all charts.
const buttons = [...document.querySelectorAll(".legend button")];
const charts = [...document.querySelectorAll(".chart")];
const on = (key, value) => buttons.some((b) => b.dataset[key] === value && b.ariaPressed === "true");
const measured = (value) => value === "" || on("measure", value); // a loss is neither
function redraw() {
  for (const curve of document.querySelectorAll(".curve"))
    curve.classList.toggle("off", !(on("run", curve.dataset.run) && measured(curve.dataset.measure)));
  for (const chart of charts) show(chart, null);
}
for (const button of buttons)
  button.addEventListener("click", () => {
    button.ariaPressed = String(button.ariaPressed !== "true");
    redraw();
  });

// The point under the pointer or reached by the arrow keys, in words.
const place = (point) => [point.cx.baseVal.value, point.cy.baseVal.value];
function show(chart, point) {
  const svg = chart.querySelector("svg"), ring = svg.querySelector(".at"), tip = chart.querySelector(".tip");
  chart.point = point;
  ring.setAttribute("visibility", point ? "visible" : "hidden");
  tip.textContent = point ? point.dataset.tip : "";
  if (!point) return;
  const [x, y] = place(point), scale = svg.clientWidth / svg.viewBox.baseVal.width;
  ring.setAttribute("cx", x);
  ring.setAttribute("cy", y);
  tip.style.left = tip.style.top = "0"; // its width does not depend on where it was
  const left = Math.min(Math.max(x * scale - tip.offsetWidth / 2, 0), svg.clientWidth - tip.offsetWidth);
  const above = y * scale - tip.offsetHeight - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 0 ? y * scale + 12 : above}px`;
}
for (const chart of charts) {
  const svg = chart.querySelector("svg");
  const curves = () =>
    [...svg.querySelectorAll(".curve:not(.off)")].map((c) => [...c.querySelectorAll("circle")]).filter((c) => c.length);
  const nearest = (points, x, y) => {
    const far = (p) => Math.hypot(place(p)[0] - x, place(p)[1] - y);
    return points.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
  };
  const hover = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    show(chart, nearest(curves().flat(), x, y));
  };
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerdown", hover);
  svg.addEventListener("pointerleave", () => show(chart, null));
  svg.addEventListener("blur", () => show(chart, null));
  svg.addEventListener("keydown", (event) => {
    const all = curves(), step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Escape") show(chart, null);
    if (!step || !all.length) return;
    event.preventDefault();
    const row = all.findIndex((c) => c.includes(chart.point));
    if (row < 0) return show(chart, all.at(-1)[0]);
    const column = all[row].indexOf(chart.point);
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") return show(chart, all[row][column + step] ?? chart.point);
    show(chart, nearest(all.at((row + step) % all.length), ...place(chart.point)));
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
