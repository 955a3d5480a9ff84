// Watches /v1/live, stores and draws the last minutes, and reconnects after a server restart.
import { LineChart, WINDOW_S } from "./charts.js";
import { bytes, count, ms, msNumber, msParts, percent } from "./format.js";
import { showGenerating } from "./generation.js";
import { showBlocks, showClosed, showDevices, showPhases, showTroubles, showWorkers } from "./tables.js";

const QUIET_MS = 5000; // without an event, before the shown data counts as stale
const RETRY_MS = 1000;
const HIDDEN_MS = 30000; // a hidden page disconnects after this time, to save work for the server
const OTHERS = 7; // the color of all names beyond the palette
const palettes = { model: [1, 3, 2, 4, 5], code: [2, 5, 4, 3, 6] };
const colors = { model: new Map([["", 6]]), code: new Map([["ok", 1]]) };
const events = [];
let requestsBy = "model";
const byId = id => document.getElementById(id);

const charts = {
  requests: new LineChart(byId("chart-requests"), { label: "Requests per second", format: count, lines: [] }),
  latency: new LineChart(byId("chart-latency"), { label: "Latency", format: ms, lines: [
    { key: "p50", name: "p50", color: 3 }, { key: "p95", name: "p95", color: 1 }, { key: "p99", name: "p99", color: 4 }] }),
  inflight: new LineChart(byId("chart-inflight"), { label: "Requests in flight", format: count, least: 4, isFilled: true,
    lines: [{ key: "inflight", name: "in flight", color: 1 }] }),
  queue: new LineChart(byId("chart-queue"), { label: "Jobs in queues", format: count, least: 4, lines: [
    { key: "waiting", name: "waiting in gateways", color: 2 }, { key: "running", name: "running", color: 1 },
    { key: "on_workers", name: "waiting on workers", color: 3 }] }),
  rows: new LineChart(byId("chart-rows"), { label: "Mean rows of a batch", format: count, least: 4,
    lines: [{ key: "rows", name: "rows per batch", color: 3 }] }),
};

function valuesOf({ work, now }) {
  const { p50_ms, p95_ms, p99_ms } = work.latency;
  return {
    latency: { p50: p50_ms, p95: p95_ms, p99: p99_ms },
    inflight: { inflight: now.inflight_requests },
    queue: { waiting: now.waiting, running: now.running, on_workers: now.waiting_on_workers },
    rows: { rows: work.batches.rows_mean },
  };
}

// Each name keeps its color while the page is open; names beyond the palette share one line.
function lineOf(name) {
  const known = colors[requestsBy];
  if (!known.has(name)) known.set(name, palettes[requestsBy].shift() ?? OTHERS);
  const color = known.get(name);
  return color === OTHERS ? { key: "others", name: "others", color } : { key: `name ${name}`, name: name || "(no model)", color };
}

function drawRequests(now) {
  const ratesOf = event => requestsBy === "model" ? event.requests_by_model : event.work.by_code;
  const names = [...new Set(events.flatMap(event => Object.keys(ratesOf(event))))].sort();
  const lines = new Map(names.map(lineOf).map(line => [line.key, line]));
  charts.requests.lines = [...lines.values()];
  charts.requests.draw(events.map(event => {
    const values = Object.fromEntries([...lines.keys()].map(key => [key, 0]));
    for (const [name, rate] of Object.entries(ratesOf(event))) values[lineOf(name).key] += rate;
    return { at: event.at, seconds: event.seconds, values };
  }), now);
}

const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function showTiles({ work, now, workers, blocks }) {
  const errors = work.requests_per_s - (work.by_code.ok ?? 0);
  const [latency, unit] = msParts(work.latency.p99_ms);
  const { rows_mean: rows, padding } = work.batches;
  const held = blocks.filter(block => block.max_rows && block.work.batches.per_s);
  const batches = held.reduce((sum, block) => sum + block.work.batches.per_s, 0);
  const full = held.reduce((sum, block) =>
    sum + block.work.batches.per_s / batches * block.work.batches.rows_mean / block.max_rows, 0);
  const connected = workers.filter(worker => worker.state !== "gone");
  const instances = connected.map(worker => ({ number: worker.instances.busy + worker.instances.idle, ...worker.instances }));
  const number = instances.reduce((sum, each) => sum + each.number, 0);
  const busy = number ? instances.reduce((sum, each) => sum + each.number * (each.busy_share ?? 0), 0) / number : null;
  const texts = {
    requests: count(work.requests_per_s),
    "requests-note": errors > 0.0005 ? `${count(errors)}/s not ok` : work.requests_per_s ? "all ok" : "idle",
    latency, "latency-unit": unit,
    "latency-note": work.latency.count ? `p50 ${msNumber(work.latency.p50_ms)} · p95 ${msNumber(work.latency.p95_ms)} ms` : "",
    inflight: count(now.inflight_requests), "inflight-note": bytes(now.inflight_bytes),
    waiting: count(now.waiting + now.waiting_on_workers),
    "waiting-note": `gateways ${count(now.waiting)} · workers ${count(now.waiting_on_workers)}`,
    rows: count(rows),
    "rows-note": rows === null ? "" : [batches && `${percent(full)} % full`, padding && `padding × ${padding.toFixed(2)}`].filter(Boolean).join(" · "),
    busy: percent(busy), "busy-note": `${plural(number, "instance")} · ${plural(connected.length, "worker")}`,
  };
  for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
}

function show(event) {
  events.push(event);
  while (events[0].at < event.at - WINDOW_S - 5) events.shift();
  byId("version").textContent = event.version;
  setState(event.draining ? "draining" : event.ready ? "live" : "not ready");
  showTiles(event);
  showPhases(event.work);
  showClosed(events.filter(each => each.at > event.at - 10));
  showTroubles(events);
  showBlocks(event.blocks);
  showGenerating(events);
  showWorkers(event.workers, event.blocks);
  showDevices(event.devices, event.blocks);
  drawRequests(event.at);
  for (const name of Object.keys(valuesOf(event)))
    charts[name].draw(events.map(each => ({ at: each.at, seconds: each.seconds, values: valuesOf(each)[name] })), event.at);
}

const NAMES = { live: "Live", draining: "Draining", "not ready": "Not ready", connecting: "Connecting", disconnected: "Disconnected" };

function setState(state, why = "") {
  const isShown = state !== "disconnected" && state !== "connecting";
  byId("state").dataset.state = state;
  if (byId("state").textContent !== NAMES[state]) byId("state").textContent = NAMES[state];
  byId("main").classList.toggle("stale", !isShown);
  byId("notice").hidden = !why;
  byId("notice").textContent = why;
  document.title = state === "live" ? "Penstock" : `${NAMES[state]} · Penstock`;
}

let source = null, quiet = 0, again = 0;

function connect() {
  clearTimeout(again);
  source?.close();
  source = new EventSource("v1/live");
  watchQuiet();
  source.onmessage = message => {
    watchQuiet();
    show(JSON.parse(message.data));
  };
  source.onerror = () => {
    lose("The server does not answer. Reconnecting…");
    // A browser does not reconnect by itself after an answer that is not a stream, such as a refusal.
    if (source.readyState === EventSource.CLOSED) again = setTimeout(connect, RETRY_MS);
  };
}

function lose(why) {
  setState("disconnected", events.length ? `${why} The data shown is from before.` : why);
}

function watchQuiet() {
  clearTimeout(quiet);
  quiet = setTimeout(() => {
    lose("The server sends no data. Reconnecting…");
    connect();
  }, QUIET_MS);
}

let hidden = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(() => { source.close(); clearTimeout(quiet); clearTimeout(again); source = null; }, HIDDEN_MS);
  else if (source === null) connect();
});
for (const choice of document.querySelectorAll("[name=requests-by]"))
  choice.addEventListener("change", () => {
    requestsBy = choice.value;
    if (events.length) drawRequests(events.at(-1).at);
  });
connect();
