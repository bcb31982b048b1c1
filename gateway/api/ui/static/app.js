// The page: its three views, the choice of a replica, and whether the feed is open.

import { ChatView } from "./chat.js";
import { find, make } from "./dom.js";
import { Feed } from "./feed.js";
import { LoadView } from "./load.js";
import { MemoryView } from "./memory.js";

const NAMES = ["chat", "memory", "load"];

class Page {
  constructor(about) {
    this.feed = new Feed("feed");
    this.views = {
      chat: new ChatView(about), memory: new MemoryView(this.feed), load: new LoadView(this.feed),
    };
    this.replica = null;
    find("#model").textContent = about.model;
    find("#sign-out").hidden = !about.has_keys;
    for (const tab of document.querySelectorAll("[role=tab]")) {
      tab.addEventListener("click", () => this.open(tab.dataset.view));
      tab.addEventListener("keydown", (event) => this.moveTab(event));
    }
    find("#replica").addEventListener("change", (event) => this.choose(event.target.value));
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    addEventListener("keydown", (event) => this.press(event));
    this.feed.addEventListener("gateway", () => this.listReplicas());
    this.feed.addEventListener("frame", () => this.listReplicas());
    this.feed.addEventListener("state", ({ detail }) => this.say(detail));
    this.open(location.hash.slice(1));
    this.feed.open();
  }

  open(name) {
    const shown = NAMES.includes(name) ? name : "memory";
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
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const name = NAMES[(NAMES.indexOf(this.shown) + step + NAMES.length) % NAMES.length];
    this.open(name);
    find(`#tab-${name}`).focus();
  }

  // Keys that work wherever no text is typed.
  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    const view = NAMES[Number(event.key) - 1];
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

  listReplicas() {
    const choice = find("#replica"), { replicas } = this.feed;
    if (choice.options.length !== replicas.size) {
      choice.replaceChildren(...[...replicas.keys()].map((each) => make("option", { value: each }, each)));
      find("#replica-choice").hidden = this.shown === "chat" || replicas.size < 2;
    }
    if (this.replica === null && replicas.size) this.choose([...replicas.keys()][0]);
  }

  choose(address) {
    this.replica = this.feed.replicas.get(address);
    this.views.memory.choose(this.replica);
    this.views.load.choose(this.replica);
  }

  say(state) {
    const place = find("#connection");
    place.textContent = state === "connected" ? "live" : "reconnecting…";
    place.dataset.state = state;
  }
}

const answer = await fetch("about");
if (answer.ok) globalThis.quirePage = new Page(await answer.json());
else find("#connection").textContent = `the gateway answers ${answer.status}; reload the page`;
