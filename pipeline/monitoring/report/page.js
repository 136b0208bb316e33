"use strict";
// Draws the page from the JSON of the script element #data; see encode_runs in page.py.
// Texts of a run are inserted as text nodes, or through `escapeMarkup` where plotly interprets markup.
const COLOURS = ["#2f7ed8", "#e07b24", "#2e9e6b", "#b6519d", "#8468d3", "#cf4a4a", "#1a9aa0", "#9a7b35"];
const LEVELS = { error: "#d64545", warning: "#c98300", info: "#7c8896" };
const AXES = { step: 0, tokens: 1, hours: 2 }; // index of each x axis in a curve's `axes`
const LEGEND_LINE = 19; // height in px
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const isComparison = data.runs.length > 1;

const escapeMarkup = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const shorten = (text, length) =>
  (text.length > length ? `${text.slice(0, length - 20)}…${text.slice(-19)}` : text);
const isEval = (key) => key.startsWith("eval/");
const labelOf = (key) => (isEval(key) ? key // with the name of a data set or task
  : key.replace(/^(perf|memory)\/|_(seconds|gib)$/g, "").replaceAll("_", " "));
const formatCount = (number) => number.toLocaleString("en");
const colour = (number) => COLOURS[number % COLOURS.length];
const colourOf = (event) => LEVELS[event.level] ?? LEVELS.info;
const nameElement = (run) => element("b", { style: `color: ${colour(data.runs.indexOf(run))}` }, run.name);

function element(tag, properties, ...children) {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
}

// In the data, non-finite numbers are strings. In a plot they are gaps, which plotly draws for null.
const withGaps = (values) => values.map((value) => (typeof value === "number" ? value : null));

// The line of a curve, and behind it the faint raw curve or the bars of the bins.
function curveTraces(curve, trace) {
  const level = $("smoothing").selectedIndex, x = curve.axes[AXES[$("x").value]];
  const mode = x.length < 40 ? "lines+markers" : "lines";
  const line = { ...trace, x, y: withGaps(curve.lines[level]), mode, hovertemplate: "%{y:.5~g}" };
  const faint = { ...trace, mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip", meta: "faint" };
  if (!curve.lowest.length) return level ? [{ ...faint, x, y: withGaps(curve.lines[0]) }, line] : [line];
  const bars = curve.lowest.flatMap((lowest, point) => [lowest, curve.highest[point], null]);
  return [{ ...faint, x: x.flatMap((value) => [value, value, null]), y: withGaps(bars) }, line];
}

// With several runs, colours distinguish runs and dashes distinguish columns.
function dashOf(key, keys) {
  const index = keys.filter((other) => isEval(other) === isEval(key)).indexOf(key);
  return (isEval(key) ? ["dash", "longdashdot"] : ["solid", "dot", "dashdot"])[index];
}

const shownRuns = () => data.runs.filter((run, index) => !isComparison || $(`run-${index}`).checked);

// The curves, marks of alerts at the upper edge, and marks of non-finite values at the lower edge.
function tracesOf(keys) {
  const marks = [], axis = AXES[$("x").value];
  const traces = shownRuns().flatMap((run) => keys.filter((key) => key in run.record.curves).flatMap((key) => {
    const color = colour(isComparison ? data.runs.indexOf(run) : keys.indexOf(key));
    const curve = run.record.curves[key], suffix = keys.length > 1 ? ` ${labelOf(key)}` : "";
    const runName = shorten(run.name, Math.max(24, 40 - suffix.length));
    const name = escapeMarkup(isComparison ? runName + suffix : labelOf(key));
    for (const [point, number] of Object.entries(curve.not_finite))
      marks.push({ x: curve.axes[axis][point], text: `${name}: ${formatCount(number)} not finite`, color });
    const line = { color, width: 1.6, dash: isComparison ? dashOf(key, keys) : "solid" };
    const legendgroup = `${data.runs.indexOf(run)} ${key}`; // hides the faint curve together with its line
    return curveTraces(curve, { name, legendgroup, line, marker: { color, size: 5 }, meta: key });
  }));
  const alerts = shownRuns().flatMap((run) => run.record.alerts).map((alert) => {
    const text = escapeMarkup(shorten(`${alert.event}: ${alert.message ?? ""}`, 100));
    return { x: alert.position[axis], text, color: colourOf(alert) };
  });
  const edge = (name, marked, y, symbol) => ({
    x: marked.map(({ x }) => x), y: marked.map(() => y), text: marked.map(({ text }) => text), yaxis: "y2",
    marker: { color: marked.map(({ color }) => color), symbol, size: 9 }, mode: "markers",
    name, showlegend: false, hovertemplate: "%{text}<extra></extra>",
  });
  return [
    ...traces, edge("not finite", marks, 0.02, "x-thin-open"), edge("alerts", alerts, 1, "triangle-down"),
  ];
}

// The range of y, and the extremes outside of it.
function rangeOf(curves) {
  const extremes = curves.flatMap((curve) => curve.extremes.map(([value]) => value));
  const ends = $("full").checked ? extremes : curves.flatMap((curve) => curve.usual);
  let low = Math.min(...ends), high = Math.max(...ends);
  const beyond = [Math.max(...extremes), Math.min(...extremes)]
    .filter((value) => Number.isFinite(value) && (value > high || value < low));
  if ($("log").checked) { // a logarithmic axis has positive values only
    const above = curves.flatMap((curve) => curve.lines[0].filter((value) => value > 0));
    [low, high] = [low > 0 ? low : Math.min(...above), high].map(Math.log10);
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  const isFlat = high - low <= 1e-9 * size; // a constant is drawn flat, not as its rounding errors
  const margin = isFlat ? 0.1 * size || 1 : 0.05 * (high - low);
  return { range: Number.isFinite(high - low) ? [low - margin, high + margin] : undefined, beyond };
}

// The layout of a plot; `legendLines` is 0 without a legend.
function layoutOf(title, keys, legendLines) {
  const style = getComputedStyle(document.body), x = $("x").value, isLog = $("log").checked;
  const curves = shownRuns().flatMap((run) => keys.flatMap((key) => run.record.curves[key] ?? []));
  const { range, beyond } = rangeOf(curves), axis = { gridcolor: "#8884", zeroline: false };
  const far = beyond.map((value) => +value.toPrecision(3)).join(", ");
  return {
    title: {
      text: escapeMarkup(shorten(title, 44)) + (far && ` <sub>not in view: ${far}</sub>`),
      x: 0.02, y: 1, pad: { t: 9 }, yanchor: "top", font: { size: 14 },
    },
    font: { color: style.color, family: style.fontFamily, size: 11 },
    margin: { l: 48, r: 20, t: 36 + LEGEND_LINE * legendLines, b: 36 },
    paper_bgcolor: "#0000", plot_bgcolor: "#0000", modebar: { bgcolor: "#0000", color: "#8888" },
    showlegend: legendLines > 0, legend: { x: 0, y: 1, yanchor: "bottom", tracegroupgap: 0, maxheight: 1 },
    hovermode: "x unified", hoverlabel: { bgcolor: style.backgroundColor },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // touch scrolls the page
    uirevision: `${x} ${isLog} ${$("full").checked}`, // keeps the zoom
    xaxis: { ...axis, title: { text: x === "tokens" ? data.unit : x, standoff: 4 }, exponentformat: "SI" },
    yaxis: { ...axis, automargin: true, type: isLog ? "log" : "linear", range, exponentformat: "none" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
}

// A button that saves the plot black on white, for a paper.
function saveButton(format, icon) {
  const click = ({ data, layout, ariaLabel }) => {
    const paper = { paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: { ...layout.font, color: "#000" } };
    const filename = ariaLabel.replace(/\W+/g, "-").toLowerCase(), scale = format === "png" ? 3 : 1;
    const figure = { data, layout: { ...layout, ...paper } };
    const height = 346 + layout.margin.t; // a legend adds height and does not shrink the plot
    Plotly.downloadImage(figure, { format, filename, width: 700, height, scale });
  };
  return { name: format, title: `save as ${format.toUpperCase()}`, icon, click };
}

const waiting = new Set(); // elements of plots to draw
let isDrawing = false;

// Draw the plot of an element; returns the promise of plotly.
function draw(plot) {
  const save = [saveButton("png", Plotly.Icons.camera), saveButton("svg", Plotly.Icons.disk)];
  const options = { responsive: true, displaylogo: false, modeBarButtons: [[...save, "resetScale2d"]] };
  const traces = tracesOf(plot.keys);
  const entries = traces.filter((trace) => trace.showlegend !== false).length;
  const legendLines = isComparison || entries > 1 ? entries : 0;
  plot.style.height = `${270 + LEGEND_LINE * legendLines}px`;
  return Plotly.react(plot, traces, layoutOf(plot.ariaLabel, plot.keys, legendLines), options);
}

// One plot at a time: plotly loops forever if a plot is drawn again before it is finished.
async function drawWaiting() {
  if (isDrawing || !window.Plotly) return;
  isDrawing = true;
  for (const plot of waiting) { // includes plots that are added during the loop
    waiting.delete(plot);
    await draw(plot);
    await new Promise((done) => setTimeout(done)); // lets the browser handle input
  }
  isDrawing = false;
}

const observer = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) waiting.add(target);
  drawWaiting();
}, { rootMargin: "100px" });

// Draw plots near the window now, and the others when the window is scrolled to them.
function redraw() {
  observer.disconnect(); // so that `observe` reports each plot again
  for (const plot of document.querySelectorAll(".plot")) observer.observe(plot);
}

let wasOpen = false;
addEventListener("beforeprint", () => { // draws all plots in the size and colours of the paper
  document.documentElement.classList.add("printed");
  wasOpen = $("others").open;
  $("others").open = true;
  if (window.Plotly) document.querySelectorAll(".plot").forEach(draw);
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printed");
  $("others").open = wasOpen;
  redraw();
});

// Rows of a table, from a field of the runs or of their records: a name, and a cell for each run.
function rowsOf(field, cell = (value) => value) {
  const trees = data.runs.map((run) => run[field] ?? run.record[field]);
  const names = [...new Set(trees.flatMap(Object.keys))];
  return names.map((name) => [name, ...trees.map((tree) => cell(tree[name], tree))]);
}

function table(rows) {
  const cell = (content) => (content?.tagName === "TD" ? content : element("td", {}, content ?? "–"));
  const line = ([name, ...cells]) => element("tr", {}, element("th", {}, name), ...cells.map(cell));
  const lines = [...(isComparison ? [["", ...data.runs.map(nameElement)]] : []), ...rows].map(line);
  return rows.length ? element("div", { className: "scroll" }, element("table", {}, ...lines)) : null;
}

// The list of the entries of all runs.
function listOf(field, content) {
  const items = data.runs.flatMap((run) => run.record[field].map((each) => element("li",
    { style: `border-color: ${colourOf(each)}` }, isComparison ? nameElement(run) : "",
    element("b", {}, ` step ${formatCount(each.step)} `), ...content(each))));
  return items.length ? element("ol", { className: "scroll" }, ...items) : null;
}

// A cell with a value and its share of the sum of all values.
function shareCell(value = 0, values) {
  const percent = (100 * value) / (Object.values(values).reduce((a, b) => a + b, 0) || 1);
  const text = `${percent.toFixed(1)} % · ${formatCount(Math.round(value))}`;
  return element("td", { className: "share", style: `--share: ${percent}%` }, text);
}

// Fill a section of the page, and hide it if there is no content.
function fillSection(id, title, content) {
  const omitted = data.runs.reduce((sum, run) => sum + (run.record.num_left_out[id] ?? 0), 0);
  const note = omitted ? ` (the first and the last; ${formatCount(omitted)} in between are left out)` : "";
  $(id).hidden = content === null;
  $(id).replaceChildren(element("summary", {}, title + note), content ?? "");
}

// Show the error line of each failed run; a click on it shows the traceback.
function showFailures() {
  $("failures").replaceChildren(...data.runs.filter((run) => run.error).map((run) => {
    const line = isComparison ? [nameElement(run), ": ", run.error] : [run.error];
    if (!run.failure.trim().includes("\n")) return element("div", { className: "failure" }, ...line);
    const details = element("pre", {}, run.failure);
    return element("details", { className: "failure" }, element("summary", {}, ...line), details);
  }));
}

function showTexts() {
  const settings = rowsOf("settings");
  const differing = settings.filter(([, ...values]) => new Set(values).size > 1);
  $("runs").replaceChildren(table([...rowsOf("facts"), ...rowsOf("last_and_best"), ...differing]));
  fillSection("settings", "Settings", table(settings));
  fillSection("phases", "Wall time by phase, s", table(rowsOf("phases", shareCell)));
  fillSection("sources", "Samples by data source", table(rowsOf("sources", shareCell)));
  const line = ({ event, message = "", advice = "" }) =>
    [element("b", {}, event), ` ${message} `, element("em", {}, advice)];
  fillSection("alerts", "Alerts", listOf("alerts", line));
  fillSection("events", "Events", listOf("events", line));
  fillSection("samples", "Samples of the model", listOf("samples", ({ prompt = "", text = "" }) =>
    [element("pre", {}, element("em", {}, prompt), text)]));
  fillSection("tasks", "Answers to tasks in the last evaluation", listOf("tasks", ({ task, prompt, target, answer }) =>
    [task, element("pre", {}, element("em", {}, prompt), answer), `expected: ${target}`]));
}

function show() {
  document.querySelector("h1").textContent = isComparison ? `${data.runs.length} runs` : data.runs[0].name;
  $("created").textContent = data.created;
  showFailures();
  showTexts();
  const curves = data.runs.flatMap((run) => Object.values(run.record.curves));
  $("binned").hidden = !curves.some((curve) => curve.lowest.length);
  for (const [title, keys, isMain] of data.panels) {
    const plot = element("div", { className: "plot", id: `panel-${title}`, ariaLabel: title, keys });
    if (!$(plot.id)) (isMain ? $("panels") : $("others").lastElementChild).append(plot);
  }
  $("others").hidden = !$("others").lastElementChild.hasChildNodes();
  redraw();
}

$("x").options[1].text = data.unit;
$("smoothing").append(...data.weights.map((weight) => element("option", {}, weight)));
if (isComparison) $("controls").append(...data.runs.map((run, index) => {
  const checkbox = element("input", { type: "checkbox", id: `run-${index}`, checked: true });
  return element("label", {}, checkbox, nameElement(run));
}));
$("controls").oninput = redraw;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("DOMContentLoaded", drawWaiting); // plotly is loaded by then
show();
