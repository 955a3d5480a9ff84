// The tables of blocks, workers, GPUs, phases and problems. Names are inserted as text, never as markup.
import { make } from "./charts.js";
import { bytes, count, ms, msNumber, percent } from "./format.js";

const PHASES = [["admit", 6], ["queue", 2], ["batch", 3], ["compute", 1], ["reply", 4]];
const CLOSED = { rows: "maximum rows", tokens: "maximum tokens", padding: "too much padding", empty: "queue was empty", delay: "maximum wait" };
const byId = id => document.getElementById(id);

// Reuses the cells of existing rows, so that a selection or a scroll position survives the update.
export function showRows(body, rows, emptyText) {
  if (!rows.length) {
    const columns = body.parentNode.tHead.rows[0].cells.length;
    body.replaceChildren(make("tr", {}, make("td", { class: "none", colspan: columns }, emptyText)));
    return;
  }
  const known = new Map([...body.rows].map(row => [row.dataset.key, row]));
  body.replaceChildren(...rows.map(([key, cells]) => {
    const row = known.get(key) ?? make("tr", { "data-key": key });
    cells.forEach((cell, index) => {
      const place = row.cells[index] ?? row.appendChild(make("td"));
      if (typeof cell !== "string") place.replaceChildren(cell);
      else if (place.textContent !== cell) place.textContent = cell;
    });
    return row;
  }));
}

const pill = state => make("span", { class: "pill", "data-state": state }, state);

export function named(name, note, reason = "") {
  const cell = make("div", { class: "name" }, make("b", {}, name), make("small", {}, note));
  if (reason) cell.append(make("span", { class: "reason" }, reason));
  return cell;
}

export function meter(text, share) {
  const bar = make("i");
  bar.style.setProperty("--share", share ?? 0);
  return make("span", { class: "meter" }, text, bar);
}

function fillStack(bar, phases) {
  const means = PHASES.map(([name, color]) => [name, color, phases[name].mean_ms ?? 0]);
  const said = means.filter(([, , mean]) => mean).map(([name, , mean]) => `${name} ${ms(mean)}`).join(", ");
  bar.title = said;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", said || "no requests");
  bar.replaceChildren(...means.map(([, color, mean]) => {
    const part = make("i", { class: `k${color}` });
    part.style.flexGrow = mean;
    return part;
  }));
  return bar;
}

export function showPhases({ phases, latency }) {
  fillStack(byId("phases-bar"), phases);
  const cells = found => [found.mean_ms, found.p50_ms, found.p95_ms, found.p99_ms].map(msNumber);
  const rows = PHASES.map(([name, color]) =>
    [name, [make("span", {}, make("span", { class: `key k${color}` }), name), ...cells(phases[name])]]);
  showRows(byId("phases"), [...rows, ["request", [make("b", {}, "whole request"), ...cells(latency)]]], "");
}

export function showClosed(events) {
  const closed = {};
  let seconds = 0;
  for (const event of events) {
    seconds += event.seconds;
    for (const [reason, rate] of Object.entries(event.work.batches.closed))
      closed[reason] = (closed[reason] ?? 0) + rate * event.seconds;
  }
  const total = Object.values(closed).reduce((sum, each) => sum + each, 0);
  byId("closed").replaceChildren(...Object.entries(closed).map(([reason, number]) => {
    const bar = make("i");
    bar.style.setProperty("--share", total ? number / total : 0);
    const figures = total ? `${percent(number / total)} % · ${count(number / seconds)}/s` : "–";
    return make("li", { "data-reason": reason }, make("div", {},
      make("span", {}, reason, " ", make("small", {}, CLOSED[reason] ?? "")), make("span", {}, figures)), bar);
  }));
}

const TROUBLES = { refusals: "Refusals", retries: "Retries", workers_lost: "Workers lost", edge_refused: "Refused at the edge", failures: "Failed on workers" };

export function showTroubles(events) {
  const newest = events.at(-1).troubles;
  byId("troubles").replaceChildren(...Object.entries(TROUBLES).flatMap(([kind, name]) => {
    const reasons = Object.entries(newest[kind]);
    const total = reasons.reduce((sum, [, happened]) => sum + happened.total, 0);
    const fresh = events.reduce((sum, event) =>
      sum + Object.values(event.troubles[kind]).reduce((all, happened) => all + happened.count, 0), 0);
    const figures = make("span", {}, make("b", {}, count(total)));
    if (fresh) figures.append(" ", make("span", { class: "new", title: "in the time range of the charts" }, `+${count(fresh)}`));
    const said = reasons.map(([reason, happened]) => `${reason} ${count(happened.total)}`).join(" · ");
    return [make("dt", {}, name, figures), ...(said ? [make("dd", {}, said)] : [])];
  }));
}

function instancesAtWork({ busy, idle, busy_share }) {
  return busy + idle ? meter(`${percent(busy_share)} % of ${busy + idle}`, busy_share) : "–";
}

export function showBlocks(blocks) {
  showRows(byId("blocks"), blocks.map(block => {
    const { work } = block;
    const rows = work.batches.rows_mean;
    return [block.block_id, [
      named(block.model, `version ${block.version} · ${block.block_id}`, block.reason),
      pill(block.state), count(work.requests_per_s), ms(work.latency.p50_ms), ms(work.latency.p99_ms),
      fillStack(make("div", { class: "stack" }), work.phases),
      count(block.waiting), count(block.running), count(block.waiting_on_workers),
      rows !== null && block.max_rows ? meter(`${count(rows)} of ${block.max_rows}`, rows / block.max_rows) : count(rows),
      work.batches.padding === null ? "–" : `× ${work.batches.padding.toFixed(2)}`,
      instancesAtWork(block.instances),
    ]];
  }), "No model is deployed.");
}

export function showWorkers(workers, blocks) {
  const models = Object.fromEntries(blocks.map(block => [block.block_id, block.model]));
  showRows(byId("workers"), workers.map(worker => {
    const { busy, idle, busy_share } = worker.instances;
    const held = worker.blocks.map(id => models[id] ?? id).join(", ");
    return [worker.id, [
      named(worker.id, worker.pid ? `pid ${worker.pid}` : ""), pill(worker.state),
      worker.memory_bytes ? bytes(worker.memory_bytes) : "–",
      held ? make("div", { class: "name" }, held) : "–",
      busy + idle ? `${busy} busy, ${idle} idle` : "–",
      busy + idle ? meter(`${percent(busy_share)} %`, busy_share) : "–",
      count(worker.jobs), count(worker.waiting), count(worker.batches_per_s), count(worker.rows_per_s),
      count(worker.tokens_per_s),
    ]];
  }), "No worker is connected.");
}

export function showDevices(devices, blocks) {
  const models = Object.fromEntries(blocks.map(block => [block.block_id, block.model]));
  const share = busy => busy === null ? "–" : `${percent(busy)} %`;
  byId("devices-card").hidden = !devices.length;
  showRows(byId("devices"), devices.map(device => {
    const { used_bytes: used, memory_bytes: all } = device;
    const held = device.blocks.map(block =>
      `${models[block.block_id] ?? block.block_id} ${bytes(block.memory_bytes)} ${share(block.busy)}`).join(", ");
    return [device.uuid, [
      named(device.name, device.uuid),
      meter(`${bytes(used)} of ${bytes(all)}`, used / all), bytes(all - used),
      device.busy === null ? "–" : meter(share(device.busy), device.busy),
      device.workers.join(", "), held ? make("div", { class: "name" }, held) : "–",
    ]];
  }), "No GPU.");
}
