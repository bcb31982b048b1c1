// The example of the view of memory: three samples and four beams of one prompt, run at full speed, and then replayed
// slowly, with a sentence for each interesting event. It pauses at the end.

import { EVENT } from "./state.js";

const [STOP_MS, BETWEEN_MS, SETTLE_MS] = [3200, 260, 400];
const PROMPT = "Tell me a story about a fox.";
const TOKENS = 160;

export const example = (model) => {
  const run = { model, messages: [{ role: "user", content: PROMPT }], max_tokens: TOKENS, min_tokens: TOKENS };
  return [{ ...run, n: 3, temperature: 0.7 }, { ...run, n: 4, temperature: 0, use_beam_search: true }];
};

// The frames with interesting events, from the frame `first`: [{index, text, events}], in order.
export function stopsOf(frames, first) {
  const stops = [], seen = new Set();
  const add = (index, text, events = []) => stops.push({ index, text, events });
  const find = (kind, from, isRight = () => true) => {
    for (let index = from ?? first; index < frames.length; index += 1) {
      const event = frames[index].happened.find((each) => each.kind === kind && isRight(each) && !seen.has(each));
      if (event !== undefined) {
        seen.add(event);
        return [index, event];
      }
    }
    return [null, null];
  };
  const begin = frames.findIndex((frame, index) => index >= first && frame.memory.sequences.length > 0);
  if (begin < 0) return [];
  add(begin, "One prompt, computed once: its blocks are shared, and the number in the circle says by how many " +
    "sequences. A block is as high as it is full.");
  const [copied, copy] = find(EVENT.copy, first);
  if (copy) {
    add(copied, `A sequence is about to write into a block that others share: ${copy.text} (the paper's figure 8).`,
      [copy]);
  }
  const [forked, fork] = find(EVENT.fork, copied);
  if (fork) add(forked, `Beams part ways: ${fork.text}. No text is copied, a table is (figure 9).`, [fork]);
  const [later, second] = find(EVENT.copy, forked, ({ request }) => request === fork?.request);
  if (second) add(later, `The beams write on, each for itself, from where they part: ${second.text}.`, [second]);
  const most = Math.max(...frames.slice(begin).map(({ numbers }) => numbers.running_sequences));
  const end = frames.findLastIndex(({ numbers }) => numbers.running_sequences === most);
  if (end > (later ?? begin)) {
    add(end, "Shortly before the end: each sequence holds only the blocks that it filled, anywhere in the pool. " +
      "Orca (Max), on the right, has reserved for each of them all that the model could ever write.");
  }
  return stops.sort((a, b) => a.index - b.index);
}

// Runs the example and replays it. `view` has replica, goTo(index, events), tell(text); `ask` sends a chat.
export class Tour {
  constructor(view, ask) {
    this.view = view;
    this.ask = ask;
    this.number = 0;
  }

  stop() {
    this.number += 1;
  }

  async run(model) {
    const number = (this.number += 1), { view } = this, { replica } = view;
    const { history } = replica, started = history.frames.at(-1);
    view.narrate("It runs at full speed first, and then again slowly.");
    const answers = await Promise.all(example(model).map((body) => this.ask(body)));
    await Promise.all(answers.map((answer) => answer.text()));
    await pause(SETTLE_MS);
    if (number !== this.number || replica !== view.replica) return;
    const first = Math.max(0, history.frames.indexOf(started));
    // Frames are dropped during the replay, so they are found by identity and not by index.
    const stops = stopsOf(history.frames, first).map((stop) => ({ ...stop, frame: history.frames[stop.index] }));
    for (let frame = history.frames[first]; stops.length && frame !== undefined;) {
      const index = history.frames.indexOf(frame);
      if (index < 0) return;
      const stop = stops[0].frame === frame ? stops.shift() : null;
      view.goTo(index, stop?.events.length ? stop.events : null);
      if (stop !== null) view.narrate(stop.text);
      if (!stops.length) return;
      await pause(stop === null ? BETWEEN_MS : STOP_MS);
      if (number !== this.number || replica !== view.replica) return;
      if (stops[0].frame !== frame) frame = history.frames[history.frames.indexOf(frame) + 1];
    }
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
