// A TypeScript client over REST that needs only fetch: copy it, and add the calls that you need.

export interface Tensor {
  name: string;
  datatype: "BOOL" | "UINT8" | "INT32" | "INT64" | "FP32" | "FP64" | "BYTES";
  shape: number[];
  data: (number | string | boolean)[];
}

export interface Options {
  url?: string; // of a gateway; https://… if it has a certificate
  key?: string; // the text that `penstock key create` printed
  timeoutMs?: number; // for one call, including retries
}

/** What a server refused, and when to come back, where it said so. */
export class PenstockError extends Error {
  readonly status: number;
  readonly code: string;
  readonly retryAfterMs: number | undefined;

  constructor(status: number, code: string, message: string, retryAfterMs: number | undefined) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }
}

export class Penstock {
  readonly #url: string;
  readonly #headers: Record<string, string>;
  readonly #timeoutMs: number;

  constructor({ url = "http://localhost:8080", key = "", timeoutMs = 30_000 }: Options = {}) {
    this.#url = url.replace(/\/+$/, "");
    this.#headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
    this.#timeoutMs = timeoutMs;
  }

  /** Tensors in, tensors out: the Open Inference Protocol. */
  async infer(model: string, inputs: Tensor[]): Promise<Map<string, Tensor>> {
    const path = `/v2/models/${encodeURIComponent(model)}/infer`;
    const answer = await this.#post<{ outputs: Tensor[] }>(path, { inputs });
    return new Map(answer.outputs.map((output) => [output.name, output]));
  }

  /** A vector for each text. */
  async embed(texts: string[], model = "minilm"): Promise<number[][]> {
    const input: Tensor = { name: "text", datatype: "BYTES", shape: [texts.length], data: texts };
    const found = (await this.infer(model, [input])).get("embedding");
    if (found === undefined) throw new TypeError(`${model} has no output 'embedding'`);
    const width = found.shape[1] ?? 0;
    const numbers = found.data as number[];
    return texts.map((_, row) => numbers.slice(row * width, (row + 1) * width));
  }

  /** Tries again what was refused for now, while there is time. */
  async #post<Answer>(path: string, body: unknown): Promise<Answer> {
    const signal = AbortSignal.timeout(this.#timeoutMs);
    const end = Date.now() + this.#timeoutMs;
    for (;;) {
      const response = await fetch(this.#url + path, {
        method: "POST",
        headers: this.#headers,
        body: JSON.stringify(body),
        signal,
      });
      if (response.ok) return (await response.json()) as Answer;
      const error = await refusal(response);
      const waitMs = error.retryAfterMs;
      if (waitMs === undefined || Date.now() + waitMs > end) throw error;
      await new Promise((resolve) => setTimeout(resolve, waitMs * (1 + Math.random() / 4)));
    }
  }
}

async function refusal(response: Response): Promise<PenstockError> {
  const text = await response.text();
  let message = text;
  try {
    message = (JSON.parse(text) as { error: string }).error;
  } catch {
    // the answer is not from Penstock, but from a proxy
  }
  const ms = response.headers.get("retry-after-ms");
  const seconds = response.headers.get("retry-after");
  const wait = ms !== null ? Number(ms) : seconds !== null ? 1000 * Number(seconds) : undefined;
  return new PenstockError(response.status, response.headers.get("penstock-code") ?? "", message, wait);
}
