// The page: its three views, the choice of a replica, and whether the feed is open.

import { ChatView } from "./chat.js";
import { find, make } from "./dom.js";
import { Feed } from "./feed.js";
import { LoadView } from "./load.js";
import { MemoryView } from "./memory.js";
import { sentenceOf } from "./outage.js";

const NAMES = ["chat", "memory", "load"];
const STATES = {
  connected: "live", lost: "reconnecting…", refused: "the key is no longer valid; reload the page",
};
// A page that is hidden for this long closes its feed, so that it costs the schedulers nothing.
const HIDDEN_MS = 30_000;
// The time for which the page shows that a service has returned.
const BACK_MS = 8000;

class Page {
  constructor(about) {
    this.feed = new Feed("feed");
    this.views = {
      chat: new ChatView(about), memory: new MemoryView(this.feed), load: new LoadView(this.feed),
    };
    // A gateway without OpenAI's front has no chat.
    this.names = about.parameters ? NAMES : NAMES.slice(1);
    find("#tab-chat").hidden = !about.parameters;
    this.replica = null;
    this.version = about.version;
    this.state = "connecting";
    this.back = null;
    find("#sign-out").hidden = !about.has_keys;
    find("#kill").hidden = !about.can_kill;
    find("#kill").addEventListener("click", () => this.kill());
    this.feed.addEventListener("outage", ({ detail }) => this.tellOutage(detail));
    for (const tab of document.querySelectorAll("[role=tab]")) {
      tab.addEventListener("click", () => this.open(tab.dataset.view));
      tab.addEventListener("keydown", (event) => this.moveTab(event));
    }
    find("#replica").addEventListener("change", (event) => this.choose(event.target.value));
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    addEventListener("keydown", (event) => this.press(event));
    this.feed.addEventListener("gateway", ({ detail }) => this.takeGateway(detail));
    this.feed.addEventListener("frame", () => this.listReplicas());
    this.feed.addEventListener("state", ({ detail }) => {
      this.state = detail;
      this.say();
    });
    setInterval(() => this.say(), 200);
    document.addEventListener("visibilitychange", () => this.rest());
    this.open(location.hash.slice(1));
    this.feed.open();
  }

  rest() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.feed.close(), HIDDEN_MS);
    else if (this.feed.source === null) this.feed.open();
  }

  open(name) {
    const shown = this.names.includes(name) ? name : "memory";
    for (const each of NAMES) {
      const tab = find(`#tab-${each}`), isShown = each === shown;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      find(`#${each}`).hidden = !isShown;
      this.views[each].show(isShown);
    }
    find("#replica-choice").hidden = shown === "chat" || this.feed.replicas.size < 2;
    this.shown = shown;
    if (location.hash !== `#${shown}`) history.replaceState(null, "", `#${shown}`);
  }

  moveTab(event) {
    const { names } = this, place = names.indexOf(this.shown), last = names.length - 1;
    const places = { ArrowRight: (place + 1) % names.length, ArrowLeft: place ? place - 1 : last, Home: 0, End: last };
    const name = names[places[event.key]];
    if (name === undefined) return;
    event.preventDefault();
    this.open(name);
    find(`#tab-${name}`).focus();
  }

  // Keys that work outside of text fields.
  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    const view = this.names[Number(event.key) - 1];
    if (view !== undefined) this.open(view);
    else if (this.shown !== "memory") return;
    else if (!this.moveInTime(event)) return;
    event.preventDefault();
  }

  moveInTime(event) {
    const { memory } = this.views;
    if (event.key === " " && !event.target.matches("button")) memory.pause(memory.shown === null);
    else if (event.key === ",") memory.go(-1);
    else if (event.key === ".") memory.go(1);
    else return false;
    return true;
  }

  takeGateway({ version, model }) {
    this.listReplicas();
    // Workers may have restarted with another model.
    this.views.chat.model = model;
    find("#model").textContent = model;
    if (version !== this.version) find("#connection").textContent = "another version runs now; reload the page";
  }

  // If the shown replica is removed, the first one replaces it; without any, its last picture stays.
  listReplicas() {
    const choice = find("#replica"), { replicas } = this.feed, addresses = [...replicas.keys()];
    const shown = [...choice.options].map((each) => each.value);
    if (addresses.join() !== shown.join()) {
      choice.replaceChildren(...addresses.map((each) => make("option", { value: each }, each)));
      find("#replica-choice").hidden = this.shown === "chat" || replicas.size < 2;
    }
    if (!addresses.length) return;
    const own = this.replica?.address;
    const isThere = this.replica !== null && replicas.get(own) === this.replica;
    if (!isThere) this.choose(replicas.has(own) ? own : addresses[0]);
    choice.value = this.replica.address;
  }

  choose(address) {
    this.replica = this.feed.replicas.get(address);
    this.views.memory.choose(this.replica);
    this.views.load.choose(this.replica);
  }

  // Whether the page is connected to the gateway, and whether the gateway can serve.
  say() {
    const place = find("#connection"), bar = find("#outage"), { replica, state } = this;
    const outage = state === "connected" ? replica?.outages.current ?? null : null;
    const shown = outage === null ? state : "down";
    if (shown !== place.dataset.state) {
      place.dataset.state = shown;
      place.textContent = outage === null ? STATES[state] ?? place.textContent : `${outage.service} down`;
    }
    const told = outage ?? this.back;
    bar.hidden = told === null;
    if (told === null) return;
    bar.className = outage === null ? "good" : "bad";
    bar.textContent = sentenceOf(told, replica.now);
  }

  tellOutage({ replica, outage, isOver }) {
    if (replica !== this.replica) return;
    clearTimeout(this.forgetting);
    this.back = isOver ? outage : null;
    if (isOver) this.forgetting = setTimeout(() => { this.back = null; }, BACK_MS);
    this.say();
  }

  // Kills the worker during an answer: one that runs, or one that is requested for this.
  async kill() {
    const button = find("#kill");
    button.disabled = true;
    try {
      if (!this.feed.gateway?.live_requests) {
        this.open("chat");
        await this.views.chat.writeAtLength();
      }
      const body = JSON.stringify({ service: "worker" });
      const answer = await fetch("kill", { method: "POST", headers: { "content-type": "application/json" }, body });
      if (!answer.ok) throw new Error(`the gateway answers ${answer.status}`);
    } catch (error) {
      find("#outage").textContent = error.message;
      find("#outage").hidden = false;
    }
    setTimeout(() => { button.disabled = false; }, 1500);
  }
}

const answer = await fetch("about").catch(() => null);
if (answer === null) find("#connection").textContent = "the gateway does not answer; reload the page";
else if (answer.ok) globalThis.quirePage = new Page(await answer.json());
else find("#connection").textContent = `the gateway answers ${answer.status}; reload the page`;
