// The feed of the gateway (server-sent events): one Replica for each scheduler, with its history and its numbers.

import { History } from "./state.js";
import { Series } from "./series.js";

export class Replica {
  constructor(address) {
    this.address = address;
    this.history = new History();
    this.series = new Series();
    this.frame = null;
    this.problem = null;
  }

  add(frame) {
    this.frame = frame;
    this.problem = null;
    this.history.add(frame);
    this.series.add(frame);
  }
}

// Emits "gateway" (its state), "frame" (a Replica got one) and "state" ("connected", "lost").
export class Feed extends EventTarget {
  constructor(url) {
    super();
    this.replicas = new Map();
    this.gateway = null;
    this.url = url;
  }

  open() {
    const source = new EventSource(this.url);
    source.addEventListener("open", () => this.say("state", "connected"));
    source.addEventListener("error", () => this.say("state", "lost"));
    source.addEventListener("gateway", (event) => {
      this.gateway = JSON.parse(event.data);
      for (const each of this.gateway.replicas) {
        if (!each.connected) this.of(each.address).problem = each.problem ?? "not connected";
      }
      this.say("gateway", this.gateway);
    });
    source.addEventListener("problem", (event) => {
      const { replica, problem } = JSON.parse(event.data);
      this.of(replica).problem = problem;
      this.say("frame", this.of(replica));
    });
    source.addEventListener("frame", (event) => {
      const frame = JSON.parse(event.data);
      const replica = this.of(frame.replica);
      replica.add(frame);
      this.say("frame", replica);
    });
  }

  of(address) {
    if (!this.replicas.has(address)) this.replicas.set(address, new Replica(address));
    return this.replicas.get(address);
  }

  say(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
