// Applies the frames of a file of JSON and checks each picture against what the scheduler's core held then; then goes
// back in time, and reads the pieces of a streamed chat. Run by test_state.py.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [folder, path] = process.argv.slice(2);
const { EVENT, History, Memory, STATUS, title } = await import(`${folder}/state.js`);
const { Palette } = await import(`${folder}/palette.js`);
const { gainsOf, regionBlocks } = await import(`${folder}/gains.js`);
const { Outages, sentenceOf } = await import(`${folder}/outage.js`);
const { stopsOf } = await import(`${folder}/tour.js`);
const { Zoom } = await import(`${folder}/zoom.js`);
const { Series } = await import(`${folder}/series.js`);
const { Choice, events, kindOf, valueOf } = await import(`${folder}/openai.js`);
const recorded = JSON.parse(readFileSync(path));

function checkPicture(memory, expected) {
  assert.deepEqual([...memory.gpu.refs], expected.refs);
  assert.deepEqual([...memory.host.refs], expected.host_refs);
  assert.deepEqual(memory.names.map(Boolean), expected.is_named);
}

const history = new History(), series = new Series();
for (const { frame, expected } of recorded) {
  history.add(frame);
  series.add(frame);
  checkPicture(history.live, expected);
}

// Every frame of the last minute can be shown again, and the live picture stays.
assert.ok(history.length > 20);
const first = recorded.length - history.length;
for (const index of [0, 1, Math.floor(history.length / 2), history.length - 1]) {
  checkPicture(history.at(index), recorded[first + index].expected);
}
checkPicture(history.live, recorded.at(-1).expected);
assert.ok(history.frames[0].unix_seconds >= recorded.at(-1).frame.unix_seconds - 66);

// The picture of a large pool comes in parts, which together are one moment to go back to.
function part(isWhole, hasMore, tables, seconds) {
  const none = { gone: [], sequences: [], progress: [], lengths: [], named: [], names: [], pins: [], events: [] };
  const sequence = { number: 1, request_id: "r", num_sequences: 1, sequence_index: 0 };
  const started = isWhole ? { sequences: [sequence], progress: [1, STATUS.running, 6, 6], lengths: [1, 3] } : {};
  return {
    is_whole: isWhole, more_follows: hasMore, unix_seconds: seconds,
    numbers: { num_blocks: 4, num_host_blocks: 0, block_size: 2 }, memory: { ...none, ...started, tables },
  };
}
const pieces = new History();
const last = part(false, false, [1, 2, 0], 1);
for (const each of [part(true, true, [1, 0, 3], 1), part(false, true, [1, 1, 2], 1), last]) {
  pieces.add(each);
}
assert.equal(pieces.length, 1);
pieces.add(part(false, false, [1, 2, 1], 2));
assert.deepEqual([...pieces.at(0).gpu.refs], [1, 0, 1, 1]);
assert.deepEqual([...pieces.at(1).gpu.refs], [0, 1, 1, 1]);

// Blocks in words.
const seen = new Set();
for (const { frame } of recorded) {
  const memory = new Memory();
  if (!frame.is_whole) continue;
  memory.apply(frame);
}
for (let index = 0; index < history.length; index += 1) {
  const memory = history.at(index);
  for (const pool of [memory.gpu, memory.host]) {
    for (let block = 0; block < pool.size; block += 1) {
      const state = memory.stateOf(pool, block), holders = memory.holdersOf(pool, block);
      seen.add(state);
      assert.ok(memory.filled(pool, block) <= memory.shape.blockSize);
      assert.equal(holders.length > 0, pool.owners[block] !== 0);
      if (state === "free") assert.equal(pool.refs[block], 0);
    }
  }
}
for (const state of ["used", "shared", "cached", "swapped", "free"]) assert.ok(seen.has(state), `none was ${state}`);

// Events in words, with the names of those who took part, and with the blocks to point at.
const happened = recorded.flatMap(({ frame }) => frame.happened);
assert.deepEqual([...new Set(happened.map(({ kind }) => kind))].sort(), Object.values(EVENT).sort());
assert.deepEqual(happened.filter(({ text }) => /sequence \d/.test(text)), []);
const copy = happened.find(({ kind }) => kind === EVENT.copy);
const [, from, to] = /block (\d+) is copied to (\d+)/.exec(copy.text);
assert.deepEqual(copy.marks, [{ pool: "gpu", block: Number(to), from: Number(from) }]);
const lost = part(false, false, [], 3);
lost.memory.gone = [1];
lost.memory.events = [EVENT.preempt, 0, 1, 0];
pieces.add(lost);
assert.deepEqual(lost.happened.map(({ text }) => text), ["preempted: r will be computed again"]);
assert.deepEqual(lost.happened[0].marks.map(({ block }) => block), [3, 2, 1]);
assert.equal(lost.happened[0].request, "r");
// Whose a block was is unknown only where the request came and went between two frames.
assert.ok(happened.filter(({ request }) => request).length > 0.8 * happened.length);
const newest = history.happenedUpTo(history.length - 1, 5);
assert.deepEqual(newest, history.frames.flatMap((frame) => frame.happened).reverse().slice(0, 5));
assert.deepEqual(history.happenedUpTo(0, 1000), history.frames[0].happened.toReversed());
assert.equal(title({ request_id: "r", num_sequences: 2, sequence_index: 1 }), "r #1");
assert.equal(title({ request_id: "a-long-name", num_sequences: 1 }, 6), "a-long…");

// What paging gains: two beams of 20 tokens share their first block of 16, in a pool of 64; Orca (Max) reserves 4
// blocks for each, since the model takes 50 tokens.
assert.equal(regionBlocks(50, 16), 4);
assert.equal(gainsOf(new Memory(), 50), null);
const beams = new Memory(), pair = [1, 2].map((number) => (
  { number, request_id: "b", num_sequences: 2, sequence_index: number - 1 }
));
beams.apply({
  is_whole: true, numbers: { num_blocks: 64, num_host_blocks: 0, block_size: 16 },
  memory: {
    sequences: pair, gone: [], named: [], names: [], pins: [], events: [], lengths: [1, 2, 2, 2],
    progress: [1, STATUS.running, 20, 20, 2, STATUS.running, 20, 20], tables: [1, 0, 5, 1, 1, 6, 2, 0, 5, 2, 1, 7],
  },
});
const gains = gainsOf(beams, 50);
assert.deepEqual([gains.saved, gains.held, gains.named, gains.filled], [1, 3, 4, 24 / 48]);
assert.deepEqual([gains.orca.regions, gains.orca.reserved, gains.orca.filled], [16, 8, 40 / 128]);
assert.deepEqual([gains.fits, gains.orca.fits], [21, 8]);

// The example has a sentence for each thing to see, in the order in which they come.
const stops = stopsOf(history.frames, 0);
assert.ok(stops.length >= 3);
assert.deepEqual(stops.map(({ index }) => index), stops.map(({ index }) => index).sort((a, b) => a - b));
for (const { index, events: told } of stops) {
  for (const event of told) assert.ok(history.frames[index].happened.includes(event));
}

// Of a large pool the blocks in use are shown, and the picture stands still while they come and go.
const zoom = new Zoom(), large = { size: 4096, refs: new Uint16Array(4096) };
large.refs[4000] = 2;
const near = zoom.of(large);
assert.ok(near.includes(4000) && near.length < 200);
large.refs[4001] = 1;
assert.equal(zoom.of(large), near);
large.refs[2000] = 1;
assert.ok(zoom.of(large).includes(2000));
zoom.isWhole = true;
assert.equal(zoom.of(large), null);

// Colours: requests that run together have different ones, and keep them. Sequences of one have four shades.
const palette = new Palette();
const shades = [0, 1, 2, 3].map((index) => palette.of({ request_id: "r", sequence_index: index }));
assert.equal(new Set(shades).size, 4);
const ids = Array.from({ length: 18 }, (_, index) => `r${index}`);
palette.keep(new Set(ids));
const colours = ids.map((id) => palette.of({ request_id: id, sequence_index: 0 }));
assert.equal(new Set(colours).size, 18);
palette.keep(new Set(ids.slice(1)));
palette.keep(new Set(ids));
assert.deepEqual(ids.map((id) => palette.of({ request_id: id, sequence_index: 0 })), colours);

// Numbers.
assert.ok(series.samples.length > 3);
assert.ok(series.steps.some((each) => each.total_us !== null));
assert.ok(series.samples.every((each) => each.generated >= 0 && each.used <= 1));
// Times to the first token are those that the replica states, of requests that ended before the page was opened, too.
const late = new Series();
for (const [at, p50] of [[1, null], [3, null], [5, 20]]) {
  const { numbers } = recorded[0].frame;
  late.add({ ...recorded[0].frame, unix_seconds: at, ended: [], numbers: { ...numbers, first_token_ms_p50: p50 } });
}
assert.deepEqual(late.samples.map(({ ttft50 }) => ttft50), [null, 20]);

// Charts begin with what the gateway has kept, and go on with frames.
const long = new Series();
long.begin([{ at: 1, running: 3 }, { at: 3, running: 4 }]);
for (const { frame } of recorded.slice(0, 8)) long.add({ ...frame, unix_seconds: frame.unix_seconds + 5 });
assert.deepEqual(long.samples.slice(0, 2).map(({ at }) => at), [1, 3]);
assert.ok(long.samples.length > 4);

// A worker that is lost and comes back is one outage, told twice; one that still loads its first model is none.
const outages = new Outages(), ready = { connected: true, ready: true }, loading = { connected: true, ready: false };
assert.equal(outages.take(loading, 0, 1), null);
assert.equal(outages.take(ready, 0, 2), null);
const lostOne = outages.take(loading, 2, 3);
assert.match(sentenceOf(lostOne.outage, 4.5), /^The worker is down for 1.5 s. 2 requests wait for it/);
assert.equal(outages.take({ connected: false, ready: false }, 2, 4), null);
assert.deepEqual(outages.current, lostOne.outage);
assert.equal(outages.take(ready, 2, 5).isOver, true);
assert.match(sentenceOf(lostOne.outage, 9), /^The worker was down for 2.0 s and is back. 2 requests went on/);

// A streamed chat, cut at every place.
const stream = [
  { choices: [{ index: 0, delta: { content: "ab" }, logprobs: { content: [
    { token: "a", logprob: -1 }, { token: "b", logprob: -2 },
  ] } }] },
  { choices: [{ index: 0, delta: { tool_calls: [{ index: 0, id: "c1", function: { name: "f", arguments: "{" } }] } }] },
  { choices: [{
    index: 0, delta: { tool_calls: [{ index: 0, function: { arguments: "}" } }] }, finish_reason: "stop",
  }] },
];
const text = stream.map((each) => `data: ${JSON.stringify(each)}\n\n`).join("") + ": comment\n\ndata: [DONE]\n\n";
for (const size of [1, 7, 1000]) {
  const pieces = text.match(new RegExp(`[^]{1,${size}}`, "g"));
  const body = ReadableStream.from(pieces.map((each) => new TextEncoder().encode(each)));
  const choice = new Choice(0), tokens = [];
  let now = 0;
  for await (const chunk of events(body)) tokens.push(...choice.take(chunk.choices[0], (now += 500)));
  assert.deepEqual(tokens.map((each) => each.text), ["a", "b"]);
  assert.equal(choice.finish, "stop");
  assert.deepEqual(choice.message, {
    role: "assistant", content: "ab",
    tool_calls: [{ id: "c1", type: "function", function: { name: "f", arguments: "{}" } }],
  });
  assert.equal(choice.tokensPerSecond, 3);
}

// One that breaks off: with an error that says so, and without calls that may be half of one.
const cut = new Choice(0), half = new TextEncoder().encode(text.slice(0, text.indexOf('"finish_reason"') - 90));
await assert.rejects(async () => {
  for await (const chunk of events(ReadableStream.from([half]))) cut.take(chunk.choices[0], 0);
}, /the connection broke/);
assert.equal(cut.calls.length, 1);
assert.deepEqual(cut.message, { role: "assistant", content: "ab" });
assert.equal(new Choice(0).isEmpty, true);
const thinking = new Choice(0);
thinking.take({ delta: { reasoning_content: "hm" } }, 0);
assert.equal(thinking.isEmpty, false);
assert.deepEqual(thinking.message, { role: "assistant", content: "", reasoning_content: "hm" });

// Fields of the request.
assert.equal(kindOf({ anyOf: [{ type: "integer" }, { type: "null" }] }), "number");
assert.equal(kindOf({ anyOf: [{ type: "string" }, { type: "array" }] }), "json");
assert.equal(valueOf("json", '["a"]')[0], "a");
assert.equal(valueOf("number", ""), undefined);
assert.throws(() => valueOf("json", "a"), SyntaxError);
