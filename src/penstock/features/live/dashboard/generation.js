// The section about generated text: token rates and latencies, and the engines. It is hidden until text is generated.
import { LineChart } from "./charts.js";
import { count, ms, percent } from "./format.js";
import { meter, named, showRows } from "./tables.js";

const byId = id => document.getElementById(id);
let charts = null;

const makeCharts = () => ({
  tokens: new LineChart(byId("chart-tokens"), { label: "Tokens per second", format: count, lines: [
    { key: "generated", name: "generated", color: 1 }, { key: "prompt", name: "prompts", color: 6 }] }),
  first: new LineChart(byId("chart-first-token"), { label: "Time to first token", format: ms, lines: [
    { key: "p50", name: "p50", color: 3 }, { key: "p95", name: "p95", color: 1 }, { key: "p99", name: "p99", color: 4 }] }),
  between: new LineChart(byId("chart-between-tokens"), { label: "Time between tokens", format: ms, lines: [
    { key: "p50", name: "p50", color: 3 }, { key: "p95", name: "p95", color: 1 }, { key: "p99", name: "p99", color: 4 }] }),
  sequences: new LineChart(byId("chart-sequences"), { label: "Sequences", format: count, least: 4, lines: [
    { key: "running", name: "running", color: 1 }, { key: "waiting", name: "waiting", color: 2 }] }),
});

// As callers see it; if no answer is streamed, as measured in the engines.
const firstOf = found => found.first_token.count ? found.first_token : found.engine_first_token;
const betweenOf = found => found.between_tokens.count ? found.between_tokens : found.engine_between_tokens;
const percentiles = ({ p50_ms, p95_ms, p99_ms }) => ({ p50: p50_ms, p95: p95_ms, p99: p99_ms });

function valuesOf(found) {
  if (!found) return { tokens: {}, first: {}, between: {}, sequences: {} };
  return {
    tokens: { generated: found.tokens_per_s, prompt: found.prompt_tokens_per_s },
    first: percentiles(firstOf(found)),
    between: percentiles(betweenOf(found)),
    sequences: { running: found.running, waiting: found.waiting },
  };
}

function cells(name, note, found) {
  const share = found.cache_blocks ? found.cache_blocks_used / found.cache_blocks : null;
  const [first, between] = [firstOf(found), betweenOf(found)];
  return [
    named(name, note), count(found.tokens_per_s), count(found.request_tokens_per_s), count(found.prompt_tokens_per_s),
    ms(first.p50_ms), ms(first.p99_ms), ms(between.p50_ms), ms(between.p99_ms), count(found.running), count(found.waiting),
    share === null ? "–" : meter(`${count(found.cache_blocks_used)} of ${count(found.cache_blocks)}`, share),
    found.prefix_hits === null ? "–" : `${percent(found.prefix_hits)} %`, count(found.preemptions.total),
  ];
}

export function showGenerating(events) {
  const newest = events.at(-1);
  byId("generating").hidden = !newest.generating;
  if (!newest.generating) return;
  charts ??= makeCharts();
  showRows(byId("generators"), newest.blocks.filter(block => block.generating).map(block =>
    [block.block_id, cells(block.model, `version ${block.version}`, block.generating)]), "No model generates text.");
  for (const name of Object.keys(charts))
    charts[name].draw(events.map(({ at, seconds, generating }) =>
      ({ at, seconds, values: valuesOf(generating)[name] })), newest.at);
}
