// The feed of a page that stays open while gateways and replicas come and go. Run by test_state.py.

import assert from "node:assert/strict";

const [folder] = process.argv.slice(2);
const sources = [], timers = [], asked = [];
let answer = { status: 200 };

class FakeSource extends EventTarget {
  static CLOSED = 2;

  constructor(url) {
    super();
    this.url = url;
    this.readyState = 1;
    sources.push(this);
  }

  close() {
    this.readyState = FakeSource.CLOSED;
  }

  tell(name, data) {
    const event = new Event(name);
    event.data = JSON.stringify(data);
    this.dispatchEvent(event);
  }

  // As where the answer was not 200: the browser does not try again.
  refuse() {
    this.close();
    this.tell("error");
  }
}

globalThis.EventSource = FakeSource;
globalThis.fetch = async (url) => {
  asked.push(url);
  if (answer === null) throw new TypeError("nobody answers");
  return answer;
};
globalThis.setTimeout = (call, delay) => timers.push({ call, delay });
globalThis.clearTimeout = () => {};
globalThis.CustomEvent ??= class extends Event {
  constructor(name, { detail }) {
    super(name);
    this.detail = detail;
  }
};

const { Feed } = await import(`${folder}/feed.js`);
const feed = new Feed("feed"), states = [];
feed.addEventListener("state", ({ detail }) => states.push(detail));

function gateway(...addresses) {
  const replicas = addresses.map((address) => ({ address, connected: address !== "gone", ready: true, problem: null }));
  return { version: "1", model: "m", live_requests: 0, replicas };
}

// Replicas are those that the gateway has: a page that is open for a day keeps none of those before.
feed.open();
sources[0].tell("open");
sources[0].tell("gateway", gateway("a", "b"));
assert.deepEqual([...feed.replicas.keys()], ["a", "b"]);
const kept = feed.replicas.get("b");
for (let day = 0; day < 50; day += 1) sources[0].tell("gateway", gateway(`pod-${day}`, "b"));
assert.deepEqual([...feed.replicas.keys()].sort(), ["b", "pod-49"]);
assert.equal(feed.replicas.get("b"), kept);
sources[0].tell("gateway", gateway("gone"));
assert.equal(feed.replicas.get("gone").problem, "not connected");

// A stream that breaks is opened again by the browser, and one that is refused by the page, less and less often.
sources[0].readyState = 0;
sources[0].tell("error");
assert.deepEqual([states.at(-1), timers.length], ["lost", 0]);
answer = null;
for (let turn = 0; turn < 6; turn += 1) {
  sources.at(-1).refuse();
  await timers.at(-1).call();
  assert.equal(sources.length, turn + 2);
}
assert.deepEqual(timers.map((each) => each.delay), [1000, 2000, 5000, 10_000, 10_000, 10_000]);
answer = { status: 200 };
sources.at(-1).tell("open");
assert.equal(states.at(-1), "connected");
sources.at(-1).refuse();
assert.equal(timers.at(-1).delay, 1000);

// Where the key is no longer valid, nothing is asked again and again.
answer = { status: 401 };
const count = sources.length;
await timers.at(-1).call();
assert.deepEqual([states.at(-1), sources.length, asked.at(-1)], ["refused", count, "about"]);

// What a stream that was closed says later is not heard.
feed.open();
const [old] = sources.slice(-1);
feed.close();
feed.open();
const said = states.length;
old.refuse();
assert.equal(states.length, said);
