// The outages of a replica: times without its worker or its scheduler. This module does not use the page.

const KEPT = 100;

export class Outages {
  constructor() {
    this.hasServed = false;
    // The current outage; null while the replica can serve.
    this.current = null;
    // {service, from, to, live}, in seconds of the scheduler's clock, oldest first; `to` is null in the current one,
    // and `live` is the number of affected requests.
    this.all = [];
  }

  // Updates from the gateway's state of a replica. Returns the change, {outage, isOver}, or null.
  take({ connected, ready }, live, now) {
    if (ready) {
      this.hasServed = true;
      if (this.current === null) return null;
      const outage = this.current;
      outage.to = now;
      this.current = null;
      return { outage, isOver: true };
    }
    // A replica that has not served yet loads its model.
    if (!this.hasServed) return null;
    const service = connected ? "worker" : "scheduler";
    if (this.current !== null) {
      // A restarted scheduler waits for its worker: that belongs to the same outage.
      return null;
    }
    this.current = { service, from: now, to: null, live };
    this.all.push(this.current);
    if (this.all.length > KEPT) this.all.shift();
    return { outage: this.current, isOver: false };
  }
}

const streams = (count) => `${count} request${count === 1 ? "" : "s"}`;

// A sentence that describes an outage.
export function sentenceOf({ service, from, to, live }, now) {
  if (to === null) {
    const waiting = live ? `${streams(live)} wait${live === 1 ? "s" : ""} for it, and no stream is broken.`
      : "New requests wait for it.";
    const since = now - from > 0.1 ? ` for ${(now - from).toFixed(1)} s` : "";
    return `The ${service} is down${since}. ${waiting}`;
  }
  const went = live ? ` ${streams(live)} went on where ${live === 1 ? "it was" : "they were"}.` : "";
  return `The ${service} was down for ${(to - from).toFixed(1)} s and is back.${went}`;
}
