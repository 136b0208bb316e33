"use strict";
// Whatever comes from a run is put in by textContent, or through `escaped` where plotly reads a little markup.
const COLOURS = ["#2f7ed8", "#e07b24", "#2e9e6b", "#b6519d", "#8468d3", "#cf4a4a", "#1a9aa0", "#9a7b35", "#7c8896", "#8aa51f"];
const LEVELS = ["error", "warning", "info"];
const levelOf = (event) => (LEVELS.includes(event.level) ? event.level : "info");
const $ = (id) => document.getElementById(id);
const state = { x: "step", smoothing: 0, log: false, alerts: true, hidden: new Set(), range: null, open: new Map() };
const plots = new Map(); // element -> what it draws now
const visible = new Set();
let drawing = 0; // of what is to be seen, the version: every change of the controls or the data is another
let data = JSON.parse($("data").textContent);

function element(tag, properties = {}, ...children) {
  const { style = {}, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.style, style);
  made.append(...children.filter((child) => child !== null));
  return made;
}
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const cut = (text, most) => (text.length > most ? text.slice(0, most / 3) + "…" + text.slice(1 - (most * 2) / 3) : text);
const label = (key) => key.replace(/^(perf|memory)\/(.*?)(_seconds|_gib)?$/, "$2").replaceAll("_", " ");
const count = (number) => Number(number).toLocaleString("en");
const colourOf = (run) => COLOURS[data.runs.indexOf(run) % COLOURS.length];
const chip = (colour) => element("i", { className: "chip", style: { background: colour } });
const several = () => data.runs.length > 1;

function theme(name) { // a colour of page.css, as it is in the present scheme
  const probe = document.body.appendChild(element("i", { style: { color: `var(--${name})` } }));
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${count((seconds / 3600).toFixed(1))} h`;
}

function smoothed(curve) { // exponential moving average without the pull of its start, over buckets where thinned
  const x = [], y = [], weight = state.smoothing;
  let sum = 0, norm = 0;
  (curve.mean ?? curve.y).forEach((value, i) => {
    if (typeof value !== "number") return;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    x.push(curve[state.x][i]);
    y.push(sum / norm);
  });
  return { x, y };
}

function oddPoints(curve, name) { // NaN and infinity: a cross at the last finite value
  const x = [], y = [], text = [];
  let last = curve.y.find((value) => typeof value === "number") ?? 1;
  curve.y.forEach((value, i) => {
    if (typeof value === "number") last = value;
    else { x.push(curve[state.x][i]); y.push(last); text.push(`${escaped(name)} is ${value}`); }
  });
  const marker = { symbol: "x", size: 8, color: theme("error") };
  return x.length ? [{ x, y, text, mode: "markers", marker, name: "not finite", hovertemplate: "%{text}<extra></extra>" }] : [];
}

function curveTraces(panel) {
  const traces = [];
  for (const run of data.runs.filter((each) => !state.hidden.has(each.name))) {
    panel.keys.forEach((key, k) => {
      const color = several() ? colourOf(run) : COLOURS[k % COLOURS.length];
      const dash = several() ? ["solid", "dash", "dot"][k % 3] : "solid";
      for (const left of run.abandoned.filter((curves) => key in curves)) {
        const { y, [state.x]: x } = left[key];
        traces.push({ x, y: y.map((v) => (typeof v === "number" ? v : null)), mode: "lines", opacity: 0.45,
          line: { color, width: 1, dash: "dot" }, name: "taken back", hoverinfo: "skip" });
      }
      const curve = run.curves[key];
      if (!curve) return;
      const isSmooth = state.smoothing > 0 && !key.startsWith("eval/");
      const name = escaped(cut(several() ? run.name + (panel.keys.length > 1 ? ` ${label(key)}` : "") : label(key), 44));
      const drawn = { name, mode: curve.y.length < 40 ? "lines+markers" : "lines", marker: { size: 5, color },
        hovertemplate: "%{y:.5~g}" };
      traces.push({ ...drawn, x: curve[state.x], y: curve.y.map((v) => (typeof v === "number" ? v : null)),
        line: { color, dash, width: isSmooth ? 1 : 1.6 }, opacity: isSmooth ? 0.3 : 1, meta: key,
        ...(isSmooth && { mode: "lines", hoverinfo: "skip", hovertemplate: null }) });
      if (isSmooth) traces.push({ ...drawn, ...smoothed(curve), mode: "lines", line: { color, dash, width: 2 } });
      traces.push(...oddPoints(curve, name));
    });
  }
  return state.alerts ? [...traces, ...alertTraces()] : traces;
}

function alertTraces() {
  return LEVELS.flatMap((level) => {
    const x = [], y = [], text = [];
    for (const run of data.runs.filter((each) => !state.hidden.has(each.name)))
      for (const event of run.events.filter((each) => levelOf(each) === level)) {
        const said = escaped(cut(`${event.event}: ${event.message ?? ""}`, 90));
        x.push(event[state.x], event[state.x], null);
        y.push(0, 1, null);
        text.push(said, said, "");
      }
    const color = theme(level);
    return x.length ? [{ x, y, text, yaxis: "y2", mode: "lines+markers", line: { color, width: 1, dash: "dot" }, name: level,
      opacity: 0.8, marker: { color, symbol: "triangle-down", size: y.map((v) => (v ? 8 : 0)) },
      hovertemplate: "%{text}<extra></extra>" }] : [];
  });
}

function layout(more = {}) {
  const text = theme("text"), grid = theme("grid"), paper = theme("panel");
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, automargin: true, tickfont: { size: 11 } };
  return { paper_bgcolor: paper, plot_bgcolor: paper, font: { color: text, size: 12, family: "system-ui, sans-serif" },
    margin: { l: 50, r: 14, t: 10, b: 38 }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: paper, bordercolor: grid, font: { size: 11, color: text } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    uirevision: `${state.x} ${state.log}`, ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis } };
}

function curvePlot(panel) {
  const title = { text: state.x === "tokens" ? data.unit : state.x, font: { size: 11 }, standoff: 6 };
  const xaxis = { title, exponentformat: "SI", hoverformat: state.x === "hours" ? ".4~f" : ",", range: state.range };
  const share = panel.keys[0] === "perf/mfu" ? ".3~p" : undefined;
  return { traces: curveTraces(panel), layout: layout({ xaxis: { ...xaxis, autorange: state.range === null },
    yaxis: { type: state.log ? "log" : "linear", exponentformat: /s$/.test(panel.unit) && panel.unit !== "s" ? "SI" : "power", tickformat: share },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } }) };
}

const namesOf = (field) => [...new Set(data.runs.flatMap((run) => Object.keys(run[field])))];

function barPlot(field, say) { // shares of a whole, a bar a run
  const runs = data.runs.filter((run) => Object.keys(run[field]).length).toReversed();
  const whole = (run) => Object.values(run[field]).reduce((a, b) => a + b, 0) || 1;
  const traces = namesOf(field).map((name, i) => ({ type: "bar", orientation: "h", name: escaped(cut(name, 30)), marker: { color: COLOURS[i % COLOURS.length] },
    y: runs.map((_, number) => number), x: runs.map((run) => (100 * (run[field][name] ?? 0)) / whole(run)),
    customdata: runs.map((run) => say(run[field][name] ?? 0)), textposition: "inside", insidetextanchor: "middle", textangle: 0,
    insidetextfont: { color: "#fff" }, texttemplate: "%{x:.0f} % · %{customdata}",
    hovertemplate: "%{fullData.name}: %{customdata}, %{x:.1f} %<extra></extra>" }));
  const yaxis = { fixedrange: true, showgrid: false, showticklabels: several(), tickvals: runs.map((_, number) => number), ticktext: runs.map((run) => escaped(cut(run.name, 24))) };
  return { traces, layout: layout({ barmode: "stack", bargap: 0.3, hovermode: "closest", uniformtext: { mode: "hide", minsize: 10 }, margin: { l: 10, r: 14, t: 4, b: 4 },
    xaxis: { range: [0, 100], visible: false, fixedrange: true }, yaxis }) };
}

async function draw(place) {
  if (place.dataset.drawn === "drawing") return; // two at once make plotly go round for ever; it is looked at again below
  place.dataset.drawn = "drawing";
  const { traces, layout } = plots.get(place)(), version = drawing;
  const save = (format) => ({ format, filename: place.dataset.title.replace(/\W+/g, "-").toLowerCase(), width: 900, height: 500, scale: format === "png" ? 2 : 1 });
  await Plotly.react(place, traces, layout, { responsive: true, displaylogo: false, toImageButtonOptions: save("png"),
    modeBarButtons: [["toImage", { name: "svg", title: "Download plot as SVG", icon: Plotly.Icons.disk, click: (plot) => Plotly.downloadImage(plot, save("svg")) }, "resetScale2d"]] });
  if (!place.dataset.listens) place.on("plotly_relayout", (change) => { // all curves show the same stretch
    if (!("xaxis.range[0]" in change || change["xaxis.autorange"])) return;
    state.range = change["xaxis.autorange"] ? null : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    redraw();
  });
  place.dataset.listens = "yes";
  place.dataset.drawn = version;
  if (version !== drawing) drawVisible();
}

function drawVisible() { // the rest when it is scrolled to
  if (!window.Plotly) return; // it is still being read
  for (const place of visible) if (place.dataset.drawn !== String(drawing)) draw(place);
}

function redraw() {
  drawing += 1;
  requestAnimationFrame(drawVisible);
}

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) visible[isIntersecting ? "add" : "delete"](target);
  drawVisible();
}, { rootMargin: "300px" });

function panelOf(title, unit, keys, plot, place) { // keys: [[name, colour, style of its line]]
  const id = `panel-${title}`, isBar = place === "bars";
  const marks = keys.map(([name, colour, style]) => element("span", { className: "key" }, isBar ? chip(colour)
    : element("i", { className: "line", style: { borderTop: `2px ${style} ${colour}` } }), cut(name, 40)));
  const head = element("h2", {}, title, unit ? element("small", {}, unit) : null, ...(keys.length > 1 ? marks : []));
  if (!$(id)) {
    const drawn = element("div", { className: "plot", role: "img", ariaLabel: title });
    drawn.dataset.title = title;
    $(place).append(element("article", { id }, element("h2"), drawn));
    observer.observe(drawn);
  }
  $(id).firstChild.replaceWith(head);
  if (isBar) $(id).lastChild.style.height = `${24 + 34 * data.runs.length}px`;
  plots.set($(id).lastChild, plot);
}

function table(head, rows) {
  const line = (cells, tag) => element("tr", {}, ...cells.map((cell, i) => element(i ? tag : "th", { scope: i ? "" : "row" }, cell ?? "–")));
  return element("div", { className: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, line(head, "th")), element("tbody", {}, ...rows.map((row) => line(row, "td")))));
}

function folded(title, isOpen, ...content) {
  const made = element("details", { open: state.open.get(title) ?? isOpen }, element("summary", {}, title), ...content);
  made.addEventListener("toggle", () => state.open.set(title, made.open));
  return made;
}

const badge = (run) => element("b", { className: `badge ${run.state}` }, run.status);

function showRuns() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.facts)))];
  const facts = several()
    ? table(["", ...data.runs.map((run) => element("span", {}, chip(colourOf(run)), run.name))],
      [["state", ...data.runs.map(badge)], ...names.map((name) => [name, ...data.runs.map((run) => run.facts[name])])])
    : element("dl", {}, ...names.map((name) => element("div", {}, element("dt", {}, name), element("dd", {}, data.runs[0].facts[name]))));
  const failures = data.runs.filter((run) => run.failure).map((run) => folded(`${several() ? run.name + ": w" : "W"}hy it ended`, true, element("pre", { className: "failure" }, run.failure)));
  const differ = data.differences.map(([key, values]) => [key, ...values]);
  const difference = several() ? folded(`What differs in their settings (${differ.length})`, differ.length < 25, differ.length ? table(["", ...data.runs.map((run) => run.name)], differ) : "nothing") : null;
  $("runs").replaceChildren(...(several() ? [] : [badge(data.runs[0])]), facts, ...failures, ...(difference ? [difference] : []));
}

function showEvents() {
  const told = new Set(["step", "tokens", "hours", "event", "level", "message", "advice"]);
  const events = data.runs.flatMap((run) => run.events.map((event) => ({ run, event }))).sort((a, b) => a.event.step - b.event.step);
  const rows = events.map(({ run, event }) => element("li", { className: levelOf(event) },
    element("b", {}, several() ? chip(colourOf(run)) : null, `step ${count(event.step)}  ${event.event}`), ` ${event.message ?? ""} `, element("em", {}, event.advice ?? ""),
    element("small", {}, Object.entries(event).filter(([key]) => !told.has(key)).map(([key, value]) => ` ${key} ${value}`).join(","))));
  const all = data.runs.reduce((sum, run) => sum + run.numEvents, 0);
  const samples = data.runs.flatMap((run) => run.samples.map((sample) => ({ run, sample }))).reverse();
  const texts = samples.map(({ run, sample }, i) => folded(`${several() ? run.name + ", " : ""}step ${count(sample.step)}${samples.filter((s) => s.run === run && s.sample.step === sample.step).length > 1 ? ` (${i + 1})` : ""}`, i === 0,
    element("pre", {}, sample.prompt ? element("mark", {}, sample.prompt) : null, sample.text ?? "")));
  const tables = data.runs.map((run) => [run.name, table(["key", "value"], Object.entries(run.settings))]);
  const settings = folded("Settings", false, ...(several() ? tables.map(([name, rows]) => folded(`Settings of ${name}`, false, rows)) : [tables[0][1]]));
  const title = `Alerts (${count(all)}${rows.length < all ? `, the first and last ${count(rows.length)} of them` : ""})`;
  const others = data.panels.filter((panel) => !panel.main).length;
  $("lists").replaceChildren(...(all ? [folded(title, true, element("ol", { tabIndex: 0 }, ...rows))] : []),
    ...(texts.length ? [folded(`What the model wrote (${texts.length})`, !several(), ...texts)] : []), settings);
  $("others").firstChild.textContent = `All other columns (${others})`;
  $("others").hidden = !others;
  $("with-alerts").hidden = !all;
}

function render() {
  $("title").textContent = several() ? `${data.runs.length} training runs` : data.runs[0].name;
  $("made").textContent = `${data.live ? "live, " : ""}${data.made}`;
  const hasTokens = data.runs.some((run) => Object.values(run.curves).some((curve) => curve.tokens.some((value) => value)));
  const hasRows = data.runs.some((run) => Object.keys(run.curves).length);
  $("axis").replaceChildren($("axis").firstElementChild, ...["step", "tokens", "hours"].filter((x) => x !== "tokens" || hasTokens).map((x) => element("label", {},
    element("input", { type: "radio", name: "x", value: x, checked: x === state.x, onchange: () => { state.x = x; state.range = null; redraw(); } }), x === "tokens" ? data.unit : x)));
  $("controls").hidden = !hasRows;
  for (const old of document.querySelectorAll("#controls > .run")) old.remove();
  if (several()) $("controls").append(...data.runs.map((run) => {
    const button = element("button", { type: "button", className: "run", ariaPressed: String(!state.hidden.has(run.name)) }, chip(colourOf(run)), cut(run.name, 40));
    button.onclick = () => { state.hidden[state.hidden.has(run.name) ? "delete" : "add"](run.name); button.ariaPressed = String(!state.hidden.has(run.name)); redraw(); };
    return button;
  }));
  showRuns();
  for (const panel of data.panels) {
    const keys = panel.keys.map((key, k) => [label(key), several() ? "currentColor" : COLOURS[k % COLOURS.length], several() ? ["solid", "dashed", "dotted"][k % 3] : "solid"]);
    panelOf(panel.title, panel.unit, keys, () => curvePlot(panel), panel.main ? "panels" : "grid");
  }
  for (const [title, field, say, least] of [["Where the time went", "phases", duration, 1], ["Samples by data source", "sources", count, 2]])
    if (namesOf(field).length >= least) panelOf(title, "", namesOf(field).map((name, i) => [name, COLOURS[i % COLOURS.length]]), () => barPlot(field, say), "bars");
  showEvents();
  redraw();
}

async function follow() { // a new state of the files every few seconds; what the reader has set stays
  try {
    const answer = await fetch(`data.json?seen=${data.version}`, { cache: "no-store" });
    if (answer.status === 200) { data = await answer.json(); render(); }
    else if (answer.status !== 204) throw new Error(await answer.text());
  } catch (error) { $("made").textContent = `not live any more: ${error.message}`; }
  setTimeout(follow, 3000);
}

const schemes = { auto: "light dark", light: "light", dark: "dark" };
function setScheme(name) {
  document.documentElement.style.colorScheme = schemes[name];
  $("theme").textContent = `theme: ${name}`;
  $("theme").onclick = () => { const all = Object.keys(schemes); setScheme(all[(all.indexOf(name) + 1) % 3]); redraw(); };
}
setScheme("auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
$("smoothing").oninput = (event) => { state.smoothing = Number(event.target.value); $("amount").textContent = state.smoothing; redraw(); };
$("log").onchange = (event) => { state.log = event.target.checked; redraw(); };
$("alerts").onchange = (event) => { state.alerts = event.target.checked; redraw(); };
$("controls").onsubmit = (event) => event.preventDefault();
addEventListener("DOMContentLoaded", drawVisible);
render();
if (data.live) setTimeout(follow, 3000);
