// The list of events of blocks. It has one entry for each request, which expands to its events, so that a swap is not
// hidden among the forks of other requests; and notices, such as the loss of a worker.

import { make, whole } from "./dom.js";
import { EVENT } from "./state.js";

const MAX_GROUPS = 24;
const MAX_LISTED = 30;
const KINDS = {
  [EVENT.preempt]: ["preemption", "preemptions"], [EVENT.swapOut]: ["block swapped out", "blocks swapped out"],
  [EVENT.swapIn]: ["block swapped in", "blocks swapped in"], [EVENT.copy]: ["copy-on-write", "copies on write"],
  [EVENT.fork]: ["fork", "forks"],
};
// In the order of importance.
const ORDER = [EVENT.preempt, EVENT.swapOut, EVENT.swapIn, EVENT.copy, EVENT.fork];

export class EventLog {
  constructor(list, palette) {
    this.list = list;
    this.palette = palette;
    this.clear();
  }

  clear() {
    this.groups = new Map();
    this.list.replaceChildren();
  }

  // Adds events, oldest first.
  add(happened) {
    const changed = new Set();
    for (const event of happened) {
      if (event.kind === undefined) {
        this.notice(event);
        continue;
      }
      const group = this.groups.get(event.request) ?? this.begin(event.request);
      group.counts.set(event.kind, (group.counts.get(event.kind) ?? 0) + 1);
      group.latest.unshift(event);
      group.latest.length = Math.min(group.latest.length, MAX_LISTED);
      changed.add(group);
    }
    for (const group of changed) this.write(group);
    while (this.list.children.length > MAX_GROUPS) this.forget(this.list.lastChild);
  }

  begin(request) {
    const group = {
      request, counts: new Map(), latest: [], said: make("span", { className: "said-kinds" }),
      chip: make("span", { className: "chip" }), events: make("ol", {}),
    };
    const name = make("span", { className: "name", title: request }, request || "requests that are over");
    const summary = make("summary", {}, group.chip, name, group.said);
    group.details = make("details", {}, summary, group.events);
    group.details.addEventListener("toggle", () => this.write(group));
    group.item = make("li", {}, group.details);
    this.groups.set(request, group);
    this.list.prepend(group.item);
    return group;
  }

  write(group) {
    const kinds = ORDER.filter((kind) => group.counts.has(kind)).map((kind) => {
      const count = group.counts.get(kind);
      return make("span", { className: kind === EVENT.copy || kind === EVENT.fork ? "" : "loud" },
        `${whole(count)} ${KINDS[kind][count === 1 ? 0 : 1]}`);
    });
    group.said.replaceChildren(...kinds);
    group.chip.style.background = this.palette.of({ request_id: group.request, sequence_index: 0 });
    group.events.replaceChildren(...(group.details.open ? group.latest.map(entryOf) : []));
  }

  // Adds a notice about all requests: {text, isBad}.
  notice({ text, isBad }) {
    this.list.prepend(make("li", { className: isBad ? "notice bad" : "notice" }, text));
  }

  forget(item) {
    for (const [request, group] of this.groups) if (group.item === item) this.groups.delete(request);
    item.remove();
  }
}

function entryOf({ step, text }) {
  return make("li", {}, make("span", { className: "when" }, step ? `step ${whole(step)}` : "between steps"), text);
}
