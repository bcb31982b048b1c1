// A chat completion over the OpenAI API: sends the request, reads its events, and joins the pieces of each choice.
// This module does not use the page.

// Sends a chat. Throws an Error with the gateway's message if it is rejected, and an AbortError if it is stopped.
export async function ask(body, signal) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
  }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the gateway does not answer", { cause: error });
  });
  if (!answer.ok) throw new Error(await refusal(answer));
  return answer;
}

async function refusal(answer) {
  const seconds = answer.headers.get("retry-after"), wait = seconds ? ` (try again in ${seconds} s)` : "";
  try {
    const { error } = await answer.json();
    return (error.param ? `${error.param}: ${error.message}` : error.message) + wait;
  } catch {
    return `the gateway answers ${answer.status}${wait}`;
  }
}

// The objects of a stream of server-sent events, up to [DONE]. Throws an Error if the stream ends before that.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) broken();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
        if (!data.length) continue;
        if (data[0] === "[DONE]") return;
        yield JSON.parse(data.join("\n"));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Browsers name this error differently: "network error", "Error in input stream".
function broken(error = null) {
  if (error?.name === "AbortError") throw error;
  throw new Error("the connection broke before the answer was over", { cause: error });
}

// One choice of an answer, up to the last received piece.
export class Choice {
  constructor(index) {
    this.index = index;
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.numTokens = 0;
    this.firstAt = null;
    this.lastAt = null;
    this.finish = null;
  }

  // Adds a piece. Returns its tokens, each {text, entry}: the entry has the log probabilities, and is null for text
  // whose single tokens are unknown.
  take({ delta = {}, logprobs = null, finish_reason: finish = null }, now) {
    const text = delta.content ?? "", entries = logprobs?.content ?? [];
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    this.text += text;
    this.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    if (text || reasoning || entries.length || delta.tool_calls) {
      this.firstAt ??= now;
      this.lastAt = now;
      this.numTokens += entries.length || 1;
    }
    if (finish !== null) this.finish = finish;
    if (!text) return [];
    const isExact = entries.length && entries.map((each) => each.token).join("") === text;
    return isExact ? entries.map((entry) => ({ text: entry.token, entry })) : [{ text, entry: null }];
  }

  addCall({ index, id, function: called = {} }) {
    this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = this.calls[index];
    call.id ||= id ?? "";
    call.function.name += called.name ?? "";
    call.function.arguments += called.arguments ?? "";
  }

  // The time between the first and the last piece, in seconds.
  get tokensPerSecond() {
    if (this.firstAt === null || this.lastAt <= this.firstAt || this.numTokens < 2) return null;
    return (this.numTokens - 1) / ((this.lastAt - this.firstAt) / 1000);
  }

  // Whether nothing has come except, perhaps, the role.
  get isEmpty() {
    return !(this.text || this.reasoning || this.calls.length);
  }

  // The tool calls; none if the answer is incomplete, since it may have ended in the middle of a call.
  get wholeCalls() {
    return this.finish === null ? [] : this.calls;
  }

  // The message for this answer in the next request.
  get message() {
    const { wholeCalls: calls, reasoning } = this;
    return {
      role: "assistant", content: this.text || (calls.length ? null : ""),
      ...(calls.length && { tool_calls: calls }), ...(reasoning && { reasoning_content: reasoning }),
    };
  }
}

// How a field of the request is edited: "boolean", "number", "text" or "json", from its JSON schema.
export function kindOf(schema) {
  const types = (schema.anyOf ?? [schema]).map((each) => each.type).filter((type) => type !== "null");
  if (types.length !== 1) return "json";
  return { boolean: "boolean", integer: "number", number: "number", string: "text" }[types[0]] ?? "json";
}

// The value of a field that the user typed; undefined if empty. Throws SyntaxError.
export function valueOf(kind, typed) {
  if (typed.trim() === "") return undefined;
  if (kind === "boolean") return typed === "true";
  if (kind === "number") return Number(typed);
  return kind === "json" ? JSON.parse(typed) : typed;
}
