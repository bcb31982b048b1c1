// The view of chats: a conversation over the OpenAI API, with all parameters, several answers side by side, and the
// probabilities of their tokens.

import { find, make } from "./dom.js";
import { ask, Choice, events, kindOf, valueOf } from "./openai.js";

const OWN_FIELDS = new Set(["messages", "model", "stream", "stream_options", "tools"]);
const GROUPS = {
  "Sampling": ["temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"],
  "Several answers": ["n", "best_of", "use_beam_search", "length_penalty", "early_stopping"],
  "Penalties": ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"],
  "Output": ["logprobs", "top_logprobs", "response_format", "tool_choice"],
};
const DEFAULTS = { max_tokens: "200", logprobs: "true", top_logprobs: "5" };
const EXAMPLE_TOOL = [{
  type: "function",
  function: {
    name: "weather", description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const SUGGESTIONS = [
  "What is PagedAttention?", "What is the capital of France?", "Tell me a story about a fox.", "Write a haiku.",
];
// The data that survives a reload, only in this tab.
const KEPT = "quire-chat";

export class ChatView {
  constructor(about) {
    this.model = about.model;
    this.messages = [];
    this.running = null;
    this.fields = new Map();
    this.makeDrawer(about.parameters?.properties ?? {});
    this.suggest();
    this.restore();
    find("#compose").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    find("#prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.say();
    });
    find("#stop").addEventListener("click", () => this.running?.abort());
    find("#new-chat").addEventListener("click", () => this.clear());
    find("#chat").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (find("#token-card").hidden) this.running?.abort();
      this.showToken(null);
    });
    find("#show-parameters").addEventListener("click", () => this.toggleDrawer());
    if (matchMedia("(max-width: 860px)").matches) this.toggleDrawer();
    find("#example-tool").addEventListener("click", () => {
      find("#tools").value = JSON.stringify(EXAMPLE_TOOL, null, 2);
    });
    for (const name of ["pointerover", "focusin"]) {
      find("#conversation").addEventListener(name, (event) => this.showToken(event.target.closest(".answer .token")));
    }
    for (const name of ["pointerleave", "focusout"]) {
      find("#conversation").addEventListener(name, () => this.showToken(null));
    }
    find("#conversation").addEventListener("keydown", (event) => this.moveToken(event));
  }

  show(isVisible) {
    if (isVisible && matchMedia("(pointer: fine)").matches) find("#prompt").focus();
  }

  toggleDrawer() {
    const drawer = find("#parameters");
    drawer.hidden = !drawer.hidden;
    find("#show-parameters").setAttribute("aria-expanded", String(!drawer.hidden));
    if (!drawer.hidden) drawer.scrollIntoView({ block: "nearest" });
  }

  // Parameters: the fields of the request as the gateway describes them

  makeDrawer(properties) {
    const grouped = new Set(Object.values(GROUPS).flat());
    const others = Object.keys(properties).filter((name) => !OWN_FIELDS.has(name) && !grouped.has(name)).sort();
    for (const [title, names] of [...Object.entries(GROUPS), ["Everything else", others]]) {
      const rows = names.filter((name) => name in properties).map((name) => this.makeField(name, properties[name]));
      const details = make("details", { open: title !== "Everything else" }, make("summary", {}, title), ...rows);
      find("#fields").append(details);
    }
  }

  makeField(name, schema) {
    const kind = kindOf(schema), id = `field-${name}`, value = DEFAULTS[name] ?? "";
    const inputs = {
      boolean: () => make("select", { id }, ...["", "true", "false"].map((each) => make("option", {}, each))),
      number: () => make("input", { id, type: "number", step: "any" }),
      text: () => make("input", { id, type: "text" }),
      json: () => make("input", { id, type: "text", placeholder: "JSON" }),
    };
    const input = inputs[kind]();
    input.value = value;
    this.fields.set(name, { kind, input });
    return make("label", { className: "field", htmlFor: id }, make("span", {}, name), input);
  }

  // The fields that are set. Throws an Error that names an invalid field.
  parameters() {
    const set = {};
    for (const [name, { kind, input }] of this.fields) {
      // The input's value is empty if it is not a number.
      if (input.validity.badInput) throw new Error(`${name} is not a number`);
      let value;
      try {
        value = valueOf(kind, input.value);
      } catch {
        throw new Error(`${name} is not JSON: texts are in double quotes`);
      }
      if (value !== undefined) set[name] = value;
    }
    if (!set.logprobs) delete set.top_logprobs;
    return set;
  }

  tools() {
    const typed = find("#tools").value.trim();
    if (!typed) return {};
    try {
      return { tools: JSON.parse(typed) };
    } catch {
      throw new Error("the tools are not JSON");
    }
  }

  // The conversation

  clear() {
    this.running?.abort();
    this.running = null;
    this.enable(true);
    this.messages = [];
    find("#conversation").replaceChildren();
    this.suggest();
    this.save();
    this.showToken(null);
    find("#prompt").focus();
  }

  say() {
    const prompt = find("#prompt"), text = prompt.value.trim();
    if (!text || this.running) return;
    prompt.value = "";
    const { messages } = this, number = messages.length;
    messages.push({ role: "user", content: text });
    find("#suggestions")?.remove();
    find("#conversation").append(make("article", { className: "user" }, make("p", {}, text)));
    this.answer(() => {
      messages.length = number;
      prompt.value ||= text;
    });
  }

  // Example questions in an empty chat.
  suggest() {
    const buttons = SUGGESTIONS.map((text) => {
      const button = make("button", { type: "button" }, text);
      button.addEventListener("click", () => {
        find("#prompt").value = text;
        this.say();
      });
      return button;
    });
    const hint = "Ask the model something. Point at a token to see how likely it was.";
    find("#conversation").append(make(
      "div", { id: "suggestions" }, make("p", { className: "hint" }, hint), make("div", {}, ...buttons),
    ));
  }

  save() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.messages));
    } catch {
      // The storage is full or disabled: the chat continues without it.
    }
  }

  // Restores the chat after a reload, without the probabilities of its tokens.
  restore() {
    let kept = [];
    try {
      kept = JSON.parse(sessionStorage.getItem(KEPT)) ?? [];
    } catch {
      return;
    }
    if (!Array.isArray(kept) || !kept.length) return;
    this.messages = kept;
    find("#suggestions").remove();
    for (const { role, content, tool_calls: calls = [] } of kept) {
      const called = calls.map((call) => make("pre", {}, `${call.function.name}(${call.function.arguments})`));
      const shown = role === "assistant"
        ? make("section", { className: "answer" }, make("p", { className: "text" }, content ?? ""), ...called)
        : make("p", { className: role === "tool" ? "mono" : "" }, content ?? "");
      find("#conversation").append(make("article", { className: role === "assistant" ? "assistant" : "user" }, shown));
    }
  }

  // Begins an answer that takes long: several answers, each with several stories (after the end of its answer a chat
  // model would write nonsense). Resolves when the first output has come.
  writeAtLength() {
    if (this.running) return Promise.resolve();
    const fields = { n: "3", max_tokens: "320", min_tokens: "320", temperature: "0.7" };
    for (const [name, value] of Object.entries(fields)) {
      const field = this.fields.get(name);
      if (field !== undefined) field.input.value = value;
    }
    find("#prompt").value = "Tell me a long story.";
    this.say();
    return new Promise((done) => {
      const watching = setInterval(() => {
        if (this.running && document.querySelectorAll(".answer .token").length < 60) return;
        clearInterval(watching);
        done();
      }, 20);
    });
  }

  // Requests the next answer. If there is no output, `undo` restores the conversation before the question.
  async answer(undo) {
    const { messages } = this;
    const place = make("div", { className: "choices" });
    const note = make("p", { className: "note", role: "status" }, "…");
    find("#conversation").append(make("article", { className: "assistant" }, place, note));
    const running = this.running = new AbortController();
    this.enable(false);
    const columns = new Map();
    const started = performance.now();
    try {
      const usage = await this.stream(place, columns, running.signal);
      note.textContent = this.describe(columns, usage, started);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      note.textContent = isStopped ? `stopped · ${this.describe(columns, null, started)}` : error.message;
      note.classList.toggle("problem", !isStopped);
    }
    // A new chat may have begun meanwhile.
    if (this.running === running) {
      this.running = null;
      this.enable(true);
    }
    if (this.messages !== messages) return;
    if ([...columns.values()].some(({ choice }) => !choice.isEmpty)) this.keep(columns, place);
    else {
      place.remove();
      undo();
    }
  }

  async stream(place, columns, signal) {
    const system = find("#system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const body = {
      model: this.model, messages, stream: true, stream_options: { include_usage: true },
      ...this.parameters(), ...this.tools(),
    };
    const answer = await ask(body, signal);
    let usage = null;
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      for (const piece of chunk.choices ?? []) {
        if (!columns.has(piece.index)) columns.set(piece.index, new Column(piece.index, place));
        columns.get(piece.index).take(piece);
      }
      this.follow();
    }
    return usage;
  }

  // Scrolls with the answer while its end is visible: the conversation, or the page if that scrolls as a whole.
  follow() {
    const conversation = find("#conversation");
    const isOwn = getComputedStyle(conversation).overflowY !== "visible";
    const room = isOwn ? conversation : document.scrollingElement;
    if (room.scrollHeight - room.scrollTop - room.clientHeight < 160) room.scrollTop = room.scrollHeight;
  }

  describe(columns, usage, started) {
    const choices = [...columns.values()].map((each) => each.choice);
    const first = Math.min(...choices.map((each) => each.firstAt ?? Infinity));
    const rates = choices.map((each) => each.tokensPerSecond).filter((each) => each !== null);
    const facts = [];
    if (usage) facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (cached) facts.push(`${cached} of the prompt cached`);
    if (rates.length) facts.push(`${rates.reduce((sum, each) => sum + each, 0).toFixed(1)} tokens/s`);
    if (Number.isFinite(first)) facts.push(`first token after ${Math.round(first - started)} ms`);
    return facts.join(" · ");
  }

  // The conversation continues from the first answer, or from the chosen one.
  keep(columns, place) {
    const position = this.messages.length;
    const all = [...columns.values()].sort((a, b) => a.choice.index - b.choice.index);
    this.messages.push(all[0].choice.message);
    this.save();
    for (const column of all) {
      if (all.length > 1) column.offer(() => this.choose(position, column, all));
      if (column.choice.wholeCalls.length) this.askForResults(column, place);
    }
    if (all.length > 1) this.choose(position, all[0], all);
    this.follow();
  }

  choose(position, chosen, all) {
    this.messages[position] = chosen.choice.message;
    this.save();
    for (const each of all) each.choose(each === chosen);
  }

  // The user answers the tool calls.
  askForResults(column, place) {
    const calls = column.choice.wholeCalls;
    const about = { rows: 2, placeholder: "what the tool returns", ariaLabel: "result of the tool" };
    const inputs = calls.map(() => make("textarea", about));
    const send = make("button", { type: "button", className: "primary" }, "Send results");
    const form = make("div", { className: "results" }, ...inputs, send);
    place.after(form);
    send.addEventListener("click", () => {
      if (this.running) return;
      form.remove();
      const { messages } = this, number = messages.length;
      calls.forEach((call, index) => {
        const content = inputs[index].value;
        messages.push({ role: "tool", tool_call_id: call.id, content });
        const shown = make("p", { className: "mono" }, `${call.function.name} → ${content}`);
        find("#conversation").append(make("article", { className: "user tool" }, shown));
      });
      this.answer(() => {
        messages.length = number;
        find("#conversation").append(form);
      });
    });
  }

  enable(isIdle) {
    find("#send").disabled = !isIdle;
    find("#stop").disabled = isIdle;
    // A screen reader reads only whole answers, and not token by token.
    find("#conversation").setAttribute("aria-busy", String(!isIdle));
  }

  // Probabilities of a token

  showToken(token) {
    const card = find("#token-card");
    this.described?.removeAttribute("aria-describedby");
    if (!token?.entry) {
      card.hidden = true;
      return;
    }
    const { token: text, logprob, top_logprobs: top = [] } = token.entry;
    const likely = top.some((each) => each.token === text) ? top : [...top, { token: text, logprob }];
    const bars = likely.map((each) => {
      const share = Math.exp(each.logprob);
      return make(
        "li", { className: each.token === text ? "chosen" : "" },
        make("span", { className: "mono" }, shown(each.token)),
        make("meter", { min: 0, max: 1, value: share }), make("span", {}, `${(100 * share).toFixed(1)} %`),
      );
    });
    card.replaceChildren(make("ol", {}, ...bars));
    card.hidden = false;
    this.described = token;
    token.setAttribute("aria-describedby", "token-card");
    const box = token.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, innerWidth - card.offsetWidth - 8));
    const isAbove = box.bottom + card.offsetHeight + 12 > innerHeight;
    card.style.left = `${left}px`;
    card.style.top = `${isAbove ? box.top - card.offsetHeight - 6 : box.bottom + 6}px`;
  }

  moveToken(event) {
    const token = event.target.closest(".token");
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!token || !next || !token[next]?.matches(".token")) return;
    token.tabIndex = -1;
    token[next].tabIndex = 0;
    token[next].focus();
    event.preventDefault();
  }
}

// One of several answers, which are shown side by side.
class Column {
  constructor(index, place) {
    this.choice = new Choice(index);
    this.thoughts = make("details", { className: "reasoning", hidden: true }, make("summary", {}, "Reasoning"));
    this.thought = make("p");
    this.thoughts.append(this.thought);
    this.text = make("p", { className: "text" });
    this.calls = make("div", { className: "calls" });
    this.foot = make("footer");
    this.element = make("section", { className: "answer" }, this.thoughts, this.text, this.calls, this.foot);
    place.append(this.element);
  }

  take(piece) {
    const { choice } = this;
    for (const { text, entry } of choice.take(piece, performance.now())) this.addToken(text, entry);
    if (choice.reasoning) {
      this.thoughts.hidden = false;
      this.thought.textContent = choice.reasoning;
    }
    this.calls.replaceChildren(...choice.calls.map((call) => (
      make("pre", {}, `${call.function.name}(${call.function.arguments})`)
    )));
    const rate = choice.tokensPerSecond;
    const facts = [`${choice.numTokens} tokens`];
    if (rate !== null) facts.push(`${rate.toFixed(1)} tokens/s`);
    if (choice.finish !== null) facts.push(choice.finish);
    this.foot.textContent = facts.join(" · ");
  }

  addToken(text, entry) {
    if (entry === null) {
      this.text.append(text);
      return;
    }
    const doubt = 1 - Math.exp(entry.logprob);
    const token = make("span", { className: "token", tabIndex: this.text.querySelector(".token") ? -1 : 0 }, text);
    token.entry = entry;
    token.style.setProperty("--doubt", doubt.toFixed(2));
    this.text.append(token);
  }

  offer(choose) {
    this.chooser = make("button", { type: "button", className: "quiet" }, "Go on with this one");
    this.chooser.addEventListener("click", choose);
    this.element.append(this.chooser);
  }

  choose(isChosen) {
    this.element.classList.toggle("chosen", isChosen);
    this.chooser.setAttribute("aria-pressed", String(isChosen));
    this.chooser.textContent = isChosen ? "The chat goes on from here" : "Go on with this one";
  }
}

const shown = (text) => JSON.stringify(text).slice(1, -1);
