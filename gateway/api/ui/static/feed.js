// The feed of the gateway (server-sent events): one Replica for each scheduler, with its history and its numbers.

import { Outages } from "./outage.js";
import { History } from "./state.js";
import { Series } from "./series.js";

export class Replica {
  constructor(address) {
    this.address = address;
    this.history = new History();
    this.series = new Series();
    this.outages = new Outages();
    this.frame = null;
    this.problem = null;
    this.lead = 0;
  }

  // Seconds of the scheduler's clock, in the last frame.
  get now() {
    return Date.now() / 1000 + this.lead;
  }

  add(frame) {
    this.frame = frame;
    this.lead = frame.unix_seconds - Date.now() / 1000;
    this.problem = null;
    this.history.add(frame);
    this.series.add(frame);
  }
}

const RETRY_MS = [1000, 2000, 5000, 10_000];

// Emits "gateway" (its state), "frame" (a Replica got a frame), "outage" (a Replica lost or regained a service) and
// "state" ("connected", "lost", "refused").
export class Feed extends EventTarget {
  constructor(url) {
    super();
    this.replicas = new Map();
    this.gateway = null;
    this.url = url;
    this.source = null;
    this.numFailed = 0;
    this.retry = null;
  }

  open() {
    this.close();
    const source = this.source = new EventSource(this.url);
    source.addEventListener("open", () => {
      this.numFailed = 0;
      this.say("state", "connected");
    });
    source.addEventListener("error", () => this.lose(source));
    source.addEventListener("gateway", (event) => this.takeGateway(JSON.parse(event.data)));
    source.addEventListener("history", (event) => {
      const { replica, samples } = JSON.parse(event.data);
      this.of(replica).series.begin(samples);
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

  close() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  takeGateway(gateway) {
    this.gateway = gateway;
    const listed = new Set(gateway.replicas.map((each) => each.address));
    for (const address of this.replicas.keys()) if (!listed.has(address)) this.replicas.delete(address);
    for (const each of gateway.replicas) {
      const replica = this.of(each.address);
      if (!each.connected) replica.problem = each.problem ?? "not connected";
      const change = replica.outages.take(each, gateway.live_requests, replica.now);
      if (change !== null) this.say("outage", { replica, ...change });
    }
    this.say("gateway", gateway);
  }

  // A browser reopens a broken stream by itself. It gives up at an answer other than 200, from a gateway that starts or
  // drains, from a proxy without a gateway, or because the key is no longer valid.
  lose(source) {
    if (source !== this.source) return;
    this.say("state", "lost");
    if (source.readyState !== EventSource.CLOSED) return;
    const delay = RETRY_MS[Math.min(this.numFailed, RETRY_MS.length - 1)];
    this.numFailed += 1;
    this.retry = setTimeout(() => this.tryAgain(source), delay);
  }

  async tryAgain(source) {
    const answer = await fetch("about").catch(() => null);
    if (source !== this.source) return;
    if (answer?.status === 401 || answer?.status === 403) this.say("state", "refused");
    else this.open();
  }

  of(address) {
    if (!this.replicas.has(address)) this.replicas.set(address, new Replica(address));
    return this.replicas.get(address);
  }

  say(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
