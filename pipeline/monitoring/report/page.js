"use strict";
// Texts of a run are inserted as text nodes, or through `escaped` where plotly interprets markup.
const COLOURS = ["#2f7ed8", "#e07b24", "#2e9e6b", "#b6519d", "#8468d3", "#cf4a4a", "#1a9aa0", "#9a7b35"];
const LEVELS = { error: "#d64545", warning: "#c98300", info: "#7c8896" };
const AXES = { step: 0, tokens: 1, hours: 2 }, LEGEND_LINE = 19; // px
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const several = data.runs.length > 1;

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 20)}…${text.slice(-19)}` : text);
const label = (key) => key.replace(/^(perf|memory)\/|_(seconds|gib)$/g, "").replaceAll("_", " ");
const count = (number) => number.toLocaleString("en");
const colour = (number) => COLOURS[number % COLOURS.length];
const colourOf = (event) => LEVELS[event.level] ?? LEVELS.info;
const named = (run) => element("b", { style: `color: ${colour(data.runs.indexOf(run))}` }, run.name);

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const numbers = (values) => values.map((value) => (typeof value === "number" ? value : null)); // null: a gap

function curveTraces(curve, trace) { // the line, and behind it the faint raw curve or the bars of the bins
  const level = $("smoothing").selectedIndex, x = curve.axes[AXES[$("x").value]];
  const mode = x.length < 40 ? "lines+markers" : "lines";
  const line = { ...trace, x, y: numbers(curve.lines[level]), mode, hovertemplate: "%{y:.5~g}" };
  const faint = { ...trace, mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip", meta: "faint" };
  if (!curve.lowest.length) return level ? [{ ...faint, x, y: numbers(curve.lines[0]) }, line] : [line];
  const bars = curve.lowest.flatMap((lowest, point) => [lowest, curve.highest[point], null]);
  return [{ ...faint, x: x.flatMap((place) => [place, place, null]), y: numbers(bars) }, line];
}

function dashOf(key, keys) { // with several runs, colours distinguish runs and dashes distinguish columns
  const isEval = (key) => key.startsWith("eval/");
  const place = keys.filter((other) => isEval(other) === isEval(key)).indexOf(key);
  return (isEval(key) ? ["dash", "longdashdot"] : ["solid", "dot", "dashdot"])[place];
}

const shownRuns = () => data.runs.filter((run, r) => !several || $(`run-${r}`).checked);

function tracesOf(keys) { // curves, alerts at the upper edge, and non-finite values at the lower edge
  const marks = [], axis = AXES[$("x").value];
  const traces = shownRuns().flatMap((run) => keys.filter((key) => key in run.record.curves).flatMap((key) => {
    const place = keys.indexOf(key), color = colour(several ? data.runs.indexOf(run) : place);
    const curve = run.record.curves[key], part = keys.length > 1 ? ` ${label(key)}` : "";
    const name = escaped(several ? cut(run.name, Math.max(24, 40 - part.length)) + part : label(key));
    for (const [point, number] of Object.entries(curve.not_finite))
      marks.push({ x: curve.axes[axis][point], text: `${name}: ${count(number)} not finite`, color });
    const line = { color, width: 1.6, dash: several ? dashOf(key, keys) : "solid" };
    const legendgroup = `${data.runs.indexOf(run)} ${key}`; // hides the faint curve together with its line
    return curveTraces(curve, { name, legendgroup, line, marker: { color, size: 5 }, meta: key });
  }));
  const alerts = shownRuns().flatMap((run) => run.record.alerts).map((alert) => {
    const text = escaped(cut(`${alert.event}: ${alert.message ?? ""}`, 100));
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

function rangeOf(curves) { // the range of y, and the extremes outside of it
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
  const room = high - low > 1e-9 * size ? 0.05 * (high - low) : 0.1 * size || 1; // keeps a constant flat
  return { range: Number.isFinite(high - low) ? [low - room, high + room] : undefined, beyond };
}

function layoutOf(title, keys, entries) {
  const style = getComputedStyle(document.body), x = $("x").value, isLog = $("log").checked;
  const curves = shownRuns().flatMap((run) => keys.flatMap((key) => run.record.curves[key] ?? []));
  const { range, beyond } = rangeOf(curves), axis = { gridcolor: "#8884", zeroline: false };
  const far = beyond.map((value) => +value.toPrecision(3)).join(", ");
  return {
    title: {
      text: escaped(cut(title, 44)) + (far && ` <sub>not in view: ${far}</sub>`),
      x: 0.02, y: 1, pad: { t: 9 }, yanchor: "top", font: { size: 14 },
    },
    font: { color: style.color, family: style.fontFamily, size: 11 },
    margin: { l: 48, r: 20, t: 36 + LEGEND_LINE * entries, b: 36 },
    paper_bgcolor: "#0000", plot_bgcolor: "#0000", modebar: { bgcolor: "#0000", color: "#8888" },
    showlegend: entries > 0, legend: { x: 0, y: 1, yanchor: "bottom", tracegroupgap: 0, maxheight: 1 },
    hovermode: "x unified", hoverlabel: { bgcolor: style.backgroundColor },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // touch scrolls the page
    uirevision: `${x} ${isLog} ${$("full").checked}`, // keeps the zoom
    xaxis: { ...axis, title: { text: x === "tokens" ? data.unit : x, standoff: 4 }, exponentformat: "SI" },
    yaxis: { ...axis, automargin: true, type: isLog ? "log" : "linear", range, exponentformat: "none" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
}

function saveButton(format, icon) { // saves black on white, for a paper
  const click = ({ data, layout, ariaLabel }) => {
    const paper = { paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: { ...layout.font, color: "#000" } };
    const filename = ariaLabel.replace(/\W+/g, "-").toLowerCase(), scale = format === "png" ? 3 : 1;
    const figure = { data, layout: { ...layout, ...paper } };
    const height = 346 + layout.margin.t; // a legend adds height and does not shrink the plot
    Plotly.downloadImage(figure, { format, filename, width: 700, height, scale });
  };
  return { name: format, title: `save as ${format.toUpperCase()}`, icon, click };
}

const waiting = new Set(); // plots to draw
let isDrawing = false;

function draw(place) {
  const save = [saveButton("png", Plotly.Icons.camera), saveButton("svg", Plotly.Icons.disk)];
  const options = { responsive: true, displaylogo: false, modeBarButtons: [[...save, "resetScale2d"]] };
  const traces = tracesOf(place.keys);
  const entries = traces.filter((trace) => trace.showlegend !== false).length;
  const lines = several || entries > 1 ? entries : 0; // lines of the legend
  place.style.height = `${270 + LEGEND_LINE * lines}px`;
  return Plotly.react(place, traces, layoutOf(place.ariaLabel, place.keys, lines), options);
}

// One plot at a time: plotly loops forever if a plot is drawn again before it is finished.
async function drawWaiting() {
  if (isDrawing || !window.Plotly) return;
  isDrawing = true;
  for (const place of waiting) { // includes plots added meanwhile
    waiting.delete(place);
    await draw(place);
    await new Promise((done) => setTimeout(done)); // lets the browser handle input
  }
  isDrawing = false;
}

const observer = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) waiting.add(target);
  drawWaiting();
}, { rootMargin: "100px" });

function redraw() { // plots near the window now, the others when they are scrolled to
  observer.disconnect(); // then `observe` reports each plot again
  for (const place of document.querySelectorAll(".plot")) observer.observe(place);
}

let wasOpen = false;
addEventListener("beforeprint", () => { // draw all plots in the size and colours of the paper
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

function rowsOf(field, cell = (value) => value) { // rows of a table: a name, and a cell for each run
  const trees = data.runs.map((run) => run[field] ?? run.record[field]);
  const names = [...new Set(trees.flatMap(Object.keys))];
  return names.map((name) => [name, ...trees.map((tree) => cell(tree[name], tree))]);
}

function table(rows) {
  const cell = (content) => (content?.tagName === "TD" ? content : element("td", {}, content ?? "–"));
  const line = ([name, ...cells]) => element("tr", {}, element("th", {}, name), ...cells.map(cell));
  const lines = [...(several ? [["", ...data.runs.map(named)]] : []), ...rows].map(line);
  return rows.length ? element("div", { className: "scroll" }, element("table", {}, ...lines)) : null;
}

function listOf(field, content) { // entries of all runs
  const items = data.runs.flatMap((run) => run.record[field].map((each) => element("li",
    { style: `border-color: ${colourOf(each)}` }, several ? named(run) : "",
    element("b", {}, ` step ${count(each.step)} `), ...content(each))));
  return items.length ? element("ol", { className: "scroll" }, ...items) : null;
}

function share(value = 0, whole) {
  const percent = (100 * value) / (Object.values(whole).reduce((a, b) => a + b, 0) || 1);
  const text = `${percent.toFixed(1)} % · ${count(Math.round(value))}`;
  return element("td", { className: "share", style: `--share: ${percent}%` }, text);
}

function fill(id, title, content) {
  const left = data.runs.reduce((sum, run) => sum + (run.record.num_left_out[id] ?? 0), 0);
  const note = left ? ` (the first and the last; ${count(left)} in between are left out)` : "";
  $(id).hidden = content === null;
  $(id).replaceChildren(element("summary", {}, title + note), content ?? "");
}

function showFailures() { // the error line, with the traceback folded behind it
  $("failures").replaceChildren(...data.runs.filter((run) => run.error).map((run) => {
    const line = [several ? named(run) : "", several ? ": " : "", run.error];
    if (!run.failure.trim().includes("\n")) return element("div", { className: "failure" }, ...line);
    const whole = element("pre", {}, run.failure);
    return element("details", { className: "failure" }, element("summary", {}, ...line), whole);
  }));
}

function showTexts() {
  const settings = rowsOf("settings");
  const differing = settings.filter(([, ...values]) => new Set(values).size > 1);
  $("runs").replaceChildren(table([...rowsOf("facts"), ...rowsOf("figures"), ...differing]));
  fill("settings", "Settings", table(settings));
  fill("phases", "Wall time by phase, s", table(rowsOf("phases", share)));
  fill("sources", "Samples by data source", table(rowsOf("sources", share)));
  const line = ({ event, message = "", advice = "" }) =>
    [element("b", {}, event), ` ${message} `, element("em", {}, advice)];
  fill("alerts", "Alerts", listOf("alerts", line));
  fill("events", "Events", listOf("events", line));
  fill("samples", "Samples of the model", listOf("samples", ({ prompt = "", text = "" }) =>
    [element("pre", {}, element("em", {}, prompt), text)]));
}

function show() {
  document.querySelector("h1").textContent = several ? `${data.runs.length} runs` : data.runs[0].name;
  $("made").textContent = data.made;
  showFailures();
  showTexts();
  const curves = data.runs.flatMap((run) => Object.values(run.record.curves));
  $("binned").hidden = !curves.some((curve) => curve.lowest.length);
  for (const [title, keys, isMain] of data.panels) {
    const place = element("div", { className: "plot", id: `panel-${title}`, ariaLabel: title, keys });
    if (!$(place.id)) (isMain ? $("panels") : $("others").lastElementChild).append(place);
  }
  $("others").hidden = !$("others").lastElementChild.hasChildNodes();
  redraw();
}

$("x").options[1].text = data.unit;
$("smoothing").append(...data.weights.map((weight) => element("option", {}, weight)));
if (several) $("controls").append(...data.runs.map((run, r) =>
  element("label", {}, element("input", { type: "checkbox", id: `run-${r}`, checked: true }), named(run))));
$("controls").oninput = redraw;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("DOMContentLoaded", drawWaiting); // plotly is loaded by then
show();
