// The chat box: talks to the gateway itself, so the coordinator never sees a word of it.

import { byId, element, setText } from "./dom.js";
import { bytes, count } from "./format.js";

const FIELDS = {
  max_tokens: 300, temperature: 0.7, overflow: "slide", stream: true, stream_options: { include_usage: true },
};
const PROBE_MS = 5000;

export class Chat {
  constructor() {
    this.gateway = null;
    this.model = null;
    this.messages = [];
    this.stopper = null;
    this.timer = null;
    this.seen = false;
    // A gateway that is not there yet costs an error in the console each time it is asked for, so only who looks
    // at this box asks.
    new IntersectionObserver(([box]) => {
      this.seen = box.isIntersecting;
      if (this.seen && this.model === null) this.probe();
    }).observe(byId("chat"));
    byId("chat-key").addEventListener("change", () => this.probe());
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-stop").addEventListener("click", () => this.stopper?.abort());
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
  }

  update(status) {
    if (status.gateway === this.gateway) return;
    this.gateway = status.gateway;
    this.model = null;
    byId("chat").hidden = byId("chat-link").hidden = this.gateway === null;
    if (this.gateway !== null) this.probe();
  }

  // Until the gateway answers: it may be started after the coordinator.
  async probe() {
    const gateway = this.gateway;
    if (gateway === null) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.probe(), PROBE_MS);
    if (document.hidden || !this.seen) return;
    this.enable(false);
    const signal = AbortSignal.timeout(PROBE_MS);
    try {
      const response = await fetch(`${gateway}/v1/models`, { headers: this.headers(), signal });
      const found = response.ok ? (await response.json()).data[0].id : null;
      if (gateway !== this.gateway) return;
      if (response.status === 401) this.askForKey();
      else if (found !== null) this.connected(found);
    } catch {
      const allow = `--origin ${location.origin}`;
      this.about(`Waiting for the gateway at ${gateway}. If it runs already, it must allow this page: ${allow}`);
    }
  }

  connected(model) {
    clearTimeout(this.timer);
    this.model = model;
    this.about(`${this.model}, served by ${this.gateway}. It continues text and was not taught to answer.`);
    this.enable(true);
  }

  askForKey() {
    byId("chat-key-label").hidden = false;
    this.about(`The gateway at ${this.gateway} asks for a key. It stays in this page and is sent to the gateway only.`);
  }

  about(text) {
    setText(byId("chat-about"), text);
  }

  enable(on) {
    byId("chat-send").disabled = byId("chat-text").disabled = !on;
  }

  headers() {
    const key = byId("chat-key").value.trim();
    return key === "" ? {} : { authorization: `Bearer ${key}` };
  }

  async send() {
    const box = byId("chat-text");
    const text = box.value;
    if (this.model === null || this.stopper !== null || text.trim() === "") return;
    const continues = new FormData(byId("chat-form")).get("manner") === "continue";
    box.value = "";
    setText(byId("chat-problem"), "");
    const bubble = continues ? this.add("text", text) : (this.add("you", text), this.add("model", ""));
    if (!continues) this.messages.push({ role: "user", content: text });
    const request = continues
      ? ["v1/completions", { model: this.model, prompt: text, ...FIELDS }]
      : ["v1/chat/completions", { model: this.model, messages: this.messages, ...FIELDS }];
    const answer = await this.stream(...request, bubble);
    if (!continues) this.messages.push({ role: "assistant", content: answer });
  }

  add(kind, text) {
    const names = { you: "You", model: "Model", text: "Text" };
    const body = element("p", { class: "said" }, text);
    const log = byId("chat-log");
    log.append(element("div", { class: `bubble ${kind}` }, element("p", { class: "speaker" }, names[kind]), body));
    log.scrollTop = log.scrollHeight;
    return body;
  }

  // Writes what comes into the bubble; returns all of it.
  async stream(path, fields, bubble) {
    let answer = "";
    this.stopper = new AbortController();
    byId("chat-stop").hidden = false;
    bubble.setAttribute("aria-busy", "true");
    try {
      for await (const chunk of this.chunks(path, fields)) {
        const choice = chunk.choices[0];
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        answer += piece;
        bubble.append(piece);
        byId("chat-log").scrollTop = byId("chat-log").scrollHeight;
        if (chunk.usage) this.cost(chunk.usage.blocktrain);
      }
    } catch (error) {
      if (error.name !== "AbortError") setText(byId("chat-problem"), `No answer: ${error.message}`);
    } finally {
      this.stopper = null;
      byId("chat-stop").hidden = true;
      bubble.removeAttribute("aria-busy");
    }
    return answer;
  }

  async *chunks(path, fields) {
    const response = await fetch(`${this.gateway}/${path}`, {
      method: "POST",
      headers: { "content-type": "application/json", ...this.headers() },
      body: JSON.stringify(fields),
      signal: this.stopper.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let pending = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  }

  cost(usage) {
    if (!usage) return;
    const wire = usage.wire_bytes_sent + usage.wire_bytes_received;
    const trips = count(usage.traversals, "traversal", "traversals");
    const moved = wire ? `, ${bytes(wire)} between gateway and stages` : "";
    setText(byId("chat-cost"), `${usage.text_bytes} bytes in ${trips}${moved}`);
  }
}
