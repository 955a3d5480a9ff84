// node embed.ts TEXT…: embeds texts and prints their similarity to the first one.
// PENSTOCK_URL is the server's address, PENSTOCK_API_KEY the key; NODE_EXTRA_CA_CERTS=ca.pem adds a trusted authority.
import { Penstock, PenstockError } from "./penstock.ts";

function likeness(a: number[], b: number[]): number {
  const dot = (x: number[], y: number[]): number => x.reduce((sum, value, i) => sum + value * (y[i] ?? 0), 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

const given = process.argv.slice(2);
const texts = given.length ? given : ["How do plants eat?", "Photosynthesis turns light into sugar.", "A red car."];
const { PENSTOCK_URL: url = "http://localhost:8080", PENSTOCK_API_KEY: key = "" } = process.env;

try {
  const vectors = await new Penstock({ url, key }).embed(texts);
  const [first = []] = vectors;
  vectors.forEach((vector, i) => console.log(`${likeness(first, vector).toFixed(4)}\t${vector.length}\t${texts[i]}`));
} catch (error) {
  if (!(error instanceof PenstockError)) throw error;
  console.error(`refused (${error.status} ${error.code}): ${error.message}`);
  process.exitCode = 1;
}
