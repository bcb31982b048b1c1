// The view of load: queues, batch, tokens per second, times, memory, replicas, the last steps, and waiting requests.

import { drawLines, drawSteps } from "./charts.js";
import { bytes, duration, fillRows, find, make, percent, short, whole } from "./dom.js";

const REASONS = {
  no_worker: "no worker is attached",
  next_step: "the next step looks at it",
  rows: "it is next; too few rows are free for its sequences",
  blocks: "it is next; too few blocks are free beside those that run",
  tokens: "requests that run use up the token budget of a step",
  behind: "others go before it",
  swapped_first: "swapped requests come back first",
  preemption: "the last step preempted: none enters then",
  constraint: "the workers compile its constraint",
  adapter: "the workers load its adapter",
  moved_blocks: "the workers fetch its blocks",
  shared_prefix: "another request computes its prefix, which it will share",
  suspects: "requests that the worker may have been lost for run alone",
};
const DASHED = [5, 4];

const CHARTS = [
  {
    id: "queues", title: "Requests",
    lines: [
      { name: "running", label: "running", colour: "--series-1" },
      { name: "waiting", label: "waiting", colour: "--series-2", dash: DASHED },
      { name: "swapped", label: "swapped", colour: "--series-4", dash: [2, 3] },
    ],
  },
  {
    id: "tokens", title: "Tokens per second",
    lines: [
      { name: "generated", label: "generated", colour: "--series-1" },
      { name: "computed", label: "computed", colour: "--series-3", dash: DASHED },
    ],
  },
  {
    id: "ttft", title: "Time to first token",
    options: { format: duration, least: 10 },
    lines: [
      { name: "ttft50", label: "median of a minute", colour: "--series-1" },
      { name: "ttft95", label: "95th percentile", colour: "--series-2", dash: DASHED },
    ],
  },
  {
    id: "memory-use", title: "KV memory",
    options: { format: percent },
    lines: [
      { name: "used", label: "in use", colour: "--series-1" },
      { name: "cached", label: "cached, free to take", colour: "--series-3", dash: DASHED },
    ],
  },
  {
    id: "batch", title: "Sequences in the batch",
    lines: [{ name: "rows", label: "rows", colour: "--series-1" }],
  },
  {
    id: "preemptions", title: "Preemptions per second",
    lines: [{ name: "preemptions", label: "preempted", colour: "--series-4" }],
  },
];

export class LoadView {
  constructor(feed) {
    this.feed = feed;
    this.replica = null;
    this.isVisible = false;
    this.canvases = new Map(CHARTS.map((chart) => [chart, this.addChart(chart)]));
    for (const name of ["frame", "gateway"]) feed.addEventListener(name, () => this.change());
    new ResizeObserver(() => this.change()).observe(find("#charts"));
  }

  addChart({ title, lines }) {
    const canvas = make("canvas", { role: "img" });
    const legend = lines.map(({ label, colour, dash }) => make(
      "span", { className: "key" },
      make("span", { className: dash ? "stroke dashed" : "stroke", style: { color: `var(${colour})` } }), label,
    ));
    find("#charts").append(make(
      "figure", {}, make("figcaption", {}, make("strong", {}, title), make("span", { className: "keys" }, ...legend)),
      make("div", { className: "plot" }, canvas),
    ));
    return canvas;
  }

  show(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) this.change();
  }

  choose(replica) {
    this.replica = replica;
    this.change();
  }

  change() {
    if (!this.isVisible || this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.draw();
    });
  }

  draw() {
    this.listReplicas();
    this.listTiers();
    const { replica } = this;
    if (!replica?.frame) return;
    const { series, frame } = replica;
    this.writeNumbers(series, frame.numbers);
    for (const [{ title, lines, options }, canvas] of this.canvases) {
      drawLines(canvas, series.samples, lines, { ...options, outages: replica.outages.all });
      const last = series.last;
      const facts = lines.map(({ name, label }) => `${label} ${last ? short(last[name] ?? 0) : "unknown"}`);
      canvas.ariaLabel = `${title}: ${facts.join(", ")}`;
    }
    this.listSteps(series.steps, frame.numbers);
    this.listWaiting(frame);
  }

  writeNumbers(series, numbers) {
    const { last } = series, pool = numbers.gpu_pool;
    const facts = [
      [
        "running", whole(numbers.running_requests),
        `${whole(numbers.running_sequences)} of ${numbers.max_num_seqs} rows`,
      ],
      ["waiting", whole(numbers.waiting_requests), `${short(numbers.waiting_tokens)} tokens`],
      ["swapped", whole(numbers.swapped_requests), `${whole(numbers.host_pool.used_blocks)} host blocks`],
      ["tokens/s", last ? short(last.generated) : "–", last ? `${short(last.computed)} computed` : ""],
      ["first token", duration(last?.ttft50), last?.ttft95 ? `95 % below ${duration(last.ttft95)}` : "median"],
      [
        "KV memory", pool.total_blocks ? percent(pool.used_blocks / pool.total_blocks) : "–",
        `${whole(pool.used_blocks)} of ${whole(pool.total_blocks)} blocks`,
      ],
      ["preemptions", whole(numbers.preemptions), `${whole(numbers.swap_outs)} by swap`],
    ];
    if (numbers.draft_tokens) {
      const drawn = percent(numbers.accepted_draft_tokens / numbers.draft_tokens);
      facts.push(["drafts right", drawn, `of ${short(numbers.draft_tokens)}`]);
    }
    find("#numbers").replaceChildren(...facts.map(([name, value, more]) => make(
      "div", {}, make("dt", {}, name), make("dd", {}, make("b", {}, value), make("small", {}, more)),
    )));
  }

  listReplicas() {
    const known = this.feed.gateway?.replicas ?? [];
    const body = find("#replicas tbody");
    const rows = known.map((each) => {
      const replica = this.feed.replicas.get(each.address), numbers = replica?.frame?.numbers;
      const problem = replica?.problem ?? each.problem;
      const waits = numbers?.draining ? "drains" : "no worker";
      const health = !each.connected ? "not connected" : each.ready ? "ready" : waits;
      const facts = numbers && each.connected ? [
        whole(numbers.running_requests), whole(numbers.waiting_requests), short(replica.series.last?.generated ?? 0),
        percent(numbers.gpu_pool.used_blocks / Math.max(1, numbers.gpu_pool.total_blocks)), numbers.policy,
      ] : ["–", "–", "–", "–", "–"];
      return [each.address, problem ? `${health}: ${problem}` : health, each.role, ...facts];
    });
    fillRows(body, rows, "th");
    known.forEach((each, place) => { body.rows[place].cells[1].className = each.ready ? "good" : "bad"; });
  }

  // The present replicas, with their numbers.
  known() {
    const listed = (this.feed.gateway?.replicas ?? []).filter((each) => each.connected);
    const numbers = listed.map(({ address }) => [address, this.feed.replicas.get(address)?.frame?.numbers]);
    return numbers.filter(([, its]) => its?.num_blocks);
  }

  listTiers() {
    const known = this.known();
    fillRows(find("#tiers tbody"), known.flatMap(([address, its]) => {
      const size = (blocks) => bytes(blocks * its.block_bytes);
      const tier = (name, blocks, of, hits) => [
        address, name, of ? `${whole(blocks)} of ${whole(of)}` : whole(blocks), size(blocks), hits,
      ];
      const { gpu_pool: pool, host_pool: host } = its, held = pool.used_blocks + pool.cached_blocks;
      const hits = its.prompt_tokens ? `${percent(its.cached_tokens / its.prompt_tokens)} of prompt tokens` : "–";
      const rows = [tier("pool", held, pool.total_blocks, hits)];
      if (host.total_blocks) {
        const fetched = its.blocks_from_host ? `${whole(its.blocks_from_host)} blocks` : "–";
        rows.push(tier("host", host.used_blocks + host.cached_blocks, host.total_blocks, fetched));
      }
      if (its.disk_blocks || its.blocks_from_disk) {
        rows.push(tier("disk", its.disk_blocks, 0, `${whole(its.blocks_from_disk)} blocks`));
      }
      return rows;
    }), "th");
    const moves = known.map(([address, its]) => [address, ...[
      its.arriving_blocks, its.offered_blocks, its.blocks_from_replicas, its.blocks_that_did_not_come,
      its.requests_moved_in, its.requests_moved_out,
    ].map(whole)]);
    find("#moves").hidden = !(known.length > 1 || moves.some((row) => row.slice(1).some((text) => text !== "0")));
    fillRows(find("#moves tbody"), moves, "th");
  }

  listSteps(steps, numbers) {
    const most = drawSteps(find("#steps canvas"), steps, numbers.max_num_batched_tokens);
    const limit = whole(numbers.max_num_batched_tokens);
    find("#steps .hint").textContent = `bars are up to ${whole(Math.round(most))} tokens; a step may have ${limit}`;
    fillRows(find("#steps tbody"), steps.slice(-8).reverse().map((each) => [
      whole(each.step_id), whole(each.num_decodes), `${whole(each.num_chunk_tokens)} in ${whole(each.num_chunks)}`,
      whole(each.num_entered), whole(each.num_preempted), whole(each.num_copied),
      `${whole(each.num_swapped_out)} / ${whole(each.num_swapped_in)}`, duration(each.plan_us / 1000),
      each.total_us === null ? "in flight" : duration(each.total_us / 1000),
    ]));
  }

  listWaiting(frame) {
    const all = frame.numbers.waiting_requests + frame.numbers.swapped_requests;
    find("#waiting .hint").textContent = all ? `the first ${frame.waiting.length} of ${whole(all)}` : "nobody waits";
    find("#waiting table").hidden = !frame.waiting.length;
    fillRows(find("#waiting tbody"), frame.waiting.map((each) => [
      each.request_id, each.tenant, each.is_swapped ? "swapped" : "waiting", whole(each.tokens_to_compute),
      duration(each.waited_ms), REASONS[each.reason] ?? "a reason that this page does not know",
    ]));
  }
}
