"use strict";
// Whatever comes from a run is put in as text, or through `escaped` where plotly reads a little markup.
const COLOURS = ["#2f7ed8", "#e07b24", "#2e9e6b", "#b6519d", "#8468d3", "#cf4a4a", "#1a9aa0", "#9a7b35"];
const LEVELS = { error: "#d64545", warning: "#c98300", info: "#7c8896" };
const AXES = { step: 0, tokens: 1, hours: 2 }, VALUE = 3; // rows of a curve
const $ = (id) => document.getElementById(id);
let data = JSON.parse($("data").textContent);
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

function smoothed(values) { // exponential moving average without the pull of its start
  const weight = $("smoothing").valueAsNumber;
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function curveTraces(curve, trace) { // smoothed, with the curve itself faint behind it
  const y = curve[VALUE].map((value) => (typeof value === "number" ? value : null));
  const mode = y.length < 40 ? "lines+markers" : "lines";
  const whole = { ...trace, x: curve[AXES[$("x").value]], y, mode, hovertemplate: "%{y:.5~g}" };
  if ($("smoothing").value === "0") return [whole];
  const faint = { opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: null };
  return [{ ...whole, ...faint }, { ...whole, y: smoothed(y), mode: "lines", meta: "smoothed" }];
}

function tracesOf(keys) { // curves, and alerts at the upper edge
  const shown = data.runs.filter((run, r) => !several || $(`run-${r}`).checked);
  const traces = shown.flatMap((run) => keys.filter((key) => key in run.record.curves).flatMap((key) => {
    const place = keys.indexOf(key), color = colour(several ? data.runs.indexOf(run) : place);
    const name = several ? `${run.name} ${keys.length > 1 ? label(key) : ""}` : label(key);
    const line = { color, width: 1.6, dash: several ? ["solid", "dash", "dot"][place] : "solid" };
    const trace = { name: escaped(cut(name, 44)), line, marker: { color, size: 5 }, meta: key };
    return curveTraces(run.record.curves[key], trace);
  }));
  const alerts = shown.flatMap((run) => run.record.events);
  return [...traces, {
    x: alerts.map((event) => event.place[AXES[$("x").value]]), y: alerts.map(() => 1), yaxis: "y2",
    text: alerts.map((event) => escaped(cut(`${event.event}: ${event.message ?? ""}`, 100))),
    marker: { color: alerts.map(colourOf), symbol: "triangle-down", size: 9 }, mode: "markers",
    name: "alerts", showlegend: false, hovertemplate: "%{text}<extra></extra>",
  }];
}

function layoutOf(title, keys) {
  const style = getComputedStyle(document.body), x = $("x").value, isLog = $("log").checked;
  const hasLegend = !several && keys.length > 1;
  const axis = { gridcolor: "#8884", zeroline: false };
  return {
    title: { text: escaped(cut(title, 44)), x: 0.02, y: 0.97, yanchor: "top", font: { size: 14 } },
    font: { color: style.color, family: style.fontFamily, size: 11 },
    margin: { l: 48, r: 20, t: hasLegend ? 58 : 40, b: 36 }, modebar: { bgcolor: "#0000", color: "#8888" },
    paper_bgcolor: "#0000", plot_bgcolor: "#0000",
    showlegend: hasLegend, legend: { orientation: "h", y: 1, yanchor: "bottom" },
    hovermode: "x unified", hoverlabel: { bgcolor: style.backgroundColor },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    uirevision: `${x} ${isLog}`, // a zoom stays
    xaxis: { ...axis, title: { text: x === "tokens" ? data.unit : x, standoff: 4 }, exponentformat: "SI" },
    yaxis: { ...axis, automargin: true, type: isLog ? "log" : "linear", exponentformat: "none" },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
}

function saveButton(format, icon) { // for a paper: black on white
  const click = ({ data, layout }) => {
    const paper = { paper_bgcolor: "#fff", plot_bgcolor: "#fff", font: { ...layout.font, color: "#000" } };
    const filename = layout.title.text.replace(/\W+/g, "-").toLowerCase(), scale = format === "png" ? 3 : 1;
    const figure = { data, layout: { ...layout, ...paper, showlegend: several || layout.showlegend } };
    Plotly.downloadImage(figure, { format, filename, width: 700, height: 420, scale });
  };
  return { name: format, title: `save as ${format.toUpperCase()}`, icon, click };
}

const waiting = new Set(); // plots to be drawn
let isDrawing = false;

async function drawWaiting() { // one by one: plotly would go round for ever at two of a plot
  if (isDrawing || !window.Plotly) return;
  isDrawing = true;
  const save = [saveButton("png", Plotly.Icons.camera), saveButton("svg", Plotly.Icons.disk)];
  const options = { responsive: true, displaylogo: false, modeBarButtons: [[...save, "resetScale2d"]] };
  for (const place of waiting) { // also what comes meanwhile
    waiting.delete(place);
    await Plotly.react(place, tracesOf(place.keys), layoutOf(place.ariaLabel, place.keys), options);
    await new Promise((done) => setTimeout(done)); // for what the reader does
  }
  isDrawing = false;
}

const observer = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) waiting.add(target);
  drawWaiting();
}, { rootMargin: "100px" });

function redraw() { // what is near the window; the rest when it is scrolled to
  observer.disconnect(); // which lets it look at each anew
  for (const place of document.querySelectorAll(".plot")) observer.observe(place);
}

function rowsOf(field, cell = (value) => value) { // for each name in it: that, and a cell for each run
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

function listOf(field, content) { // what all runs told
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
  $(id).hidden = content === null;
  $(id).replaceChildren(element("summary", {}, title), content ?? "");
}

function showWords() {
  const settings = rowsOf("settings");
  const differing = settings.filter(([, ...values]) => new Set(values).size > 1);
  $("runs").replaceChildren(table([...rowsOf("facts"), ...differing]));
  fill("settings", "Settings", table(settings));
  fill("phases", "Where the time went, s", table(rowsOf("phases", share)));
  fill("sources", "Samples by data source", table(rowsOf("sources", share)));
  const left = data.runs.reduce((sum, run) => sum + run.record.num_left_out, 0);
  fill("events", `Alerts${left ? `, the first and the last, without ${count(left)}` : ""}`,
    listOf("events", ({ event, message = "", advice = "" }) =>
      [element("b", {}, event), ` ${message} `, element("em", {}, advice)]));
  fill("samples", "What the model wrote", listOf("samples", ({ prompt = "", text = "" }) =>
    [element("pre", {}, element("em", {}, prompt), text)]));
}

function show() {
  document.querySelector("h1").textContent = several ? `${data.runs.length} runs` : data.runs[0].name;
  $("made").textContent = `${data.live ? "live, " : ""}${data.made}`;
  showWords();
  for (const [title, keys, isMain] of data.panels) {
    const place = element("div", { className: "plot", id: `panel-${title}`, ariaLabel: title, keys });
    if (!$(place.id)) (isMain ? $("panels") : $("others").lastElementChild).append(place);
  }
  $("others").hidden = !$("others").lastElementChild.hasChildNodes();
  redraw();
}

async function follow() { // what the reader has set stays
  const answer = await fetch("data.json", { cache: "no-store" }).catch(() => ({ ok: false }));
  const newer = answer.ok ? await answer.json() : { ...data, made: "not live any more", live: false };
  if (newer.made !== data.made) {
    data = newer;
    show();
  }
  setTimeout(follow, 3000);
}

$("x").options[1].text = data.unit;
if (several) $("controls").append(...data.runs.map((run, r) =>
  element("label", {}, element("input", { type: "checkbox", id: `run-${r}`, checked: true }), named(run))));
$("controls").oninput = redraw;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("DOMContentLoaded", drawWaiting); // plotly is there
show();
if (data.live) setTimeout(follow, 3000);
