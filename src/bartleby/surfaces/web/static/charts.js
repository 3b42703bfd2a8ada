// Charts of a queue: what the server remembers, then a point with every pulse.
/* global uPlot */
import { clock } from "./times.js";

const root = document.documentElement.dataset.root ?? "";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(element, data, series) {
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const options = {
    width: Math.max(240, element.clientWidth), height: 170, cursor: { y: false }, legend: { show: false },
    scales: { x: { range: (_, least, most) => [Math.min(least, most - 60), most] }, y: { range: (_, least, most) => [0, Math.max(1, most * 1.1)] } },
    axes: [{ ...axis, values: (_, marks) => marks.map((each) => clock(new Date(each * 1000))), space: 80 }, { ...axis, size: 54 }],
    series: [{}, ...series.map(([label, name]) => ({ label, stroke: colour(name), width: 2, points: { show: (plot) => plot.data[0].length < 4 } }))],
  };
  element.replaceChildren();
  return new uPlot(options, data, element);
}

async function start(section, signal) {
  const name = section.dataset.chart;
  const asked = fetch(`${root}/live/history?queue=${encodeURIComponent(name)}`, { signal });
  const history = await asked.then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
  if (!history || signal.aborted) return;  // without a past there is no chart, and the page says all else
  let [times, ready, dead, ages] = history;
  // one moment alone would be drawn as if it were a day
  times.unshift((times[0] ?? Date.now() / 1000) - 60);
  for (const each of [ready, dead, ages]) each.unshift(null);
  section.hidden = false;
  const depth = section.querySelector('[data-series="depth"]');
  const age = section.querySelector('[data-series="age"]');
  let charts = [];
  const draw = () => {
    for (const each of charts) each.destroy();
    charts = [make(depth, [times, ready, dead], [["ready", "--bar"], ["dead", "--bar-hot"]]), make(age, [times, ages], [["oldest", "--bar"]])];
  };
  draw();
  const resized = new ResizeObserver(() => { for (const [place, element] of [depth, age].entries()) charts[place].setSize({ width: Math.max(240, element.clientWidth), height: 170 }); });
  const pulse = (event) => {
    const { at, numbers } = event.detail;
    times.push(at.getTime() / 1000);
    ready.push(numbers.get(`queue.${name}.ready`));
    dead.push(numbers.get(`queue.${name}.dead`));
    ages.push(numbers.get(`queue.${name}.age`));
    for (const each of [times, ready, dead, ages]) if (each.length > 900) each.shift();
    charts[0].setData([times, ready, dead]);
    charts[1].setData([times, ages]);
  };
  document.addEventListener("bartleby-theme", draw, { signal });
  document.addEventListener("bartleby-times", draw, { signal });
  document.addEventListener("bartleby-pulse", pulse, { signal });
  resized.observe(section);
  signal.addEventListener("abort", () => { resized.disconnect(); for (const each of charts) each.destroy(); });
}

// A deed puts another page in the place of this one, with charts of its own.
let shown = null;
let gone = new AbortController();
function look() {
  const found = document.querySelector("[data-chart]");
  if (found === shown) return;
  gone.abort();
  gone = new AbortController();
  shown = found;
  if (found && window.uPlot) start(found, gone.signal);
}
document.addEventListener("htmx:after:swap", look);
look();
