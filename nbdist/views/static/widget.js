// The widget's own half in the page: brings the code once per page, keeps the connection, freezes.
//
// Loaded by anywidget once per widget instance, so it is small (it is stored with the widget's
// state) and shares what a page needs once through one key of `globalThis`. BokehJS and the views
// come as binary messages, which are never stored.

import { unpacked, unpackedFrame } from "./frame.js";

/** @typedef {import("./types").Model} Model */
/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Code} Code */
/** @typedef {import("./types").Shown} Shown */
/** @typedef {import("./types").Early} Early */

const SHARED = /** @type {Record<symbol, import("./types").Page>} */ (/** @type {unknown} */ (globalThis));
const PAGE = (SHARED[Symbol.for("nbdist")] ??= { code: new Map(), early: new Map() });

const MAX_EARLY = 240;
const OPEN_LIMIT_MS = 1500;
const STALE_AFTER_S = 3;
const ASK_AFTER_S = 10;
const ACK_EVERY = 4;
const FREEZE_AFTER_MS = 300;

/** Run a module from its text. @param {string} text @returns {Promise<any>} */
async function imported(text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return await import(url);
  } finally {
    URL.revokeObjectURL(url);
  }
}

/**
 * BokehJS writes itself to `this.Bokeh`: on an object of our own, the page's stays what it is.
 * @param {DataView[]} buffers BokehJS, the views, the figures without data
 * @returns {Promise<Code>}
 */
async function loaded([bokeh, views, figures]) {
  const [bokehText, viewsText, figuresText] = await Promise.all([bokeh, views, figures].map(unpacked));
  const wrapped = `const root={};(function(){${bokehText}\n}).call(root);export default root.Bokeh;`;
  const Bokeh = (await imported(wrapped)).default;
  Bokeh.set_log_level("error"); // it warns of ranges without data, which all have at first
  return { Bokeh, views: await imported(viewsText), figures: JSON.parse(figuresText) };
}

/** What a page holds of one version of the code. @param {string} version */
function slot(version) {
  let entry = PAGE.code.get(version);
  if (!entry) {
    /** @type {(code: Code) => void} */ let resolve = () => {};
    /** @type {(error: unknown) => void} */ let reject = () => {};
    const ready = new Promise((/** @type {(code: Code) => void} */ ok, no) => {
      resolve = ok;
      reject = no;
    });
    entry = { ready, resolve, reject, isLoading: false };
    PAGE.code.set(version, entry);
  }
  return entry;
}

/** @param {string} version @param {DataView[]} buffers */
function takeCode(version, buffers) {
  const entry = slot(version);
  if (entry.isLoading) return;
  entry.isLoading = true;
  loaded(buffers).then(entry.resolve, entry.reject);
}

/**
 * A comm that the page opens itself is answered while a cell runs, where the kernel has subshells.
 * Elsewhere the widget's own comm does, which then waits for the cell.
 * @param {Model} model @param {(message: Message, buffers: DataView[]) => void} receive
 * @returns {Promise<import("./types").Channel>}
 */
async function channel(model, receive) {
  model.on("msg:custom", receive);
  const own = {
    isDirect: false,
    send: (/** @type {object} */ message) => model.send(message),
    close: () => model.off("msg:custom", receive),
  };
  const kernel = await model.widget_manager?.kernel;
  if (!kernel?.createComm) return own;
  const comm = kernel.createComm("nbdist.view");
  comm.onMsg = (/** @type {any} */ m) => receive(m.content.data, m.buffers ?? []);
  // Opened at once it would go to the main shell. `subshellStarted` never comes without subshells.
  const without = kernel.info.then(() => (kernel.supportsSubshells ? new Promise(() => {}) : 0));
  const limit = new Promise((done) => setTimeout(done, OPEN_LIMIT_MS));
  await Promise.race([comm.subshellStarted ?? 0, without, limit]);
  comm.open({ widget: model.get("widget_id") });
  return {
    isDirect: Boolean(comm.subshellId),
    send: (message) => void comm.send(message),
    close: () => {
      model.off("msg:custom", receive);
      if (!comm.isDisposed) comm.close();
    },
  };
}

/**
 * Put text and picture where outputs of the open notebook hold this widget. An update by display id
 * reaches only pages that saw the display itself, not one that was loaded again.
 * @param {Model} model @param {string} picture base64 @param {object} metadata
 * @returns {number} how many were replaced
 */
function replaceOutputs(model, picture, metadata) {
  const cells = model.widget_manager?.context?.model?.cells;
  let replaced = 0;
  for (let i = 0; i < (cells?.length ?? 0); i++) {
    const outputs = cells.get(i).outputs;
    for (let j = 0; j < (outputs?.length ?? 0); j++) {
      const view = outputs.get(j).toJSON().data?.["application/vnd.jupyter.widget-view+json"];
      if (view?.model_id !== model.get("own_model_id")) continue;
      const data = { "text/plain": model.get("text"), "image/png": picture };
      outputs.set(j, { output_type: "display_data", data, metadata });
      replaced++;
    }
  }
  return replaced;
}

/**
 * Only listens: anywidget delivers nothing before it returns, and gives up for ever after 2 s.
 * @param {{model: Model}} props
 */
function initialize({ model }) {
  /** @type {Early} */
  const early = { frames: [], isOver: false };
  PAGE.early.set(model.get("widget_id"), early);
  model.on("msg:custom", (/** @type {Message} */ message, /** @type {DataView[]} */ buffers) => {
    if (message.type === "code") takeCode(message.version, buffers);
    else if (message.type === "freeze") {
      // The update by display id has the first chance: it also reaches the kernel's own record.
      setTimeout(() => replaceOutputs(model, message.picture, message.metadata), FREEZE_AFTER_MS);
    } else if (message.type === "frame" && !early.isOver) {
      const frame = unpackedFrame(buffers[0]);
      if (frame.header.kind === "snapshot") early.frames = [frame];
      else if (early.frames.length) early.frames.push(frame);
      if (early.frames.length > MAX_EARLY) early.frames = [];
    }
  });
}

/** One view of the widget on the page. */
class View {
  /** @param {{model: Model, el: HTMLElement, signal: AbortSignal}} props */
  constructor({ model, el, signal }) {
    this.model = model;
    this.signal = signal;
    this.id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    this.box = el.appendChild(document.createElement("div"));
    this.box.className = "nbdist";
    this.status = this.box.appendChild(document.createElement("div"));
    this.status.setAttribute("role", "status");
    this.status.textContent = "nbdist: waiting for the kernel";
    /** @type {Shown | null} */ this.shown = null;
    /** @type {import("./types").Frame[]} */ this.waiting = [];
    this.seen = 0;
    this.lost = "";
    this.ended = "";
    /** Why a frame cannot be read. */ this.refused = "";
    this.seq = -1;
    this.isLoading = false;
    /** @type {import("./types").Channel | null} */ this.channel = null;
    this.counts = { frames: 0, gaps: 0, snapshots: 0 };
  }

  async open() {
    const { model, signal } = this;
    const opening = channel(model, (message, buffers) => this.receive(message, buffers));
    const early = PAGE.early.get(model.get("widget_id"));
    for (const frame of early?.frames.splice(0) ?? []) this.takeFrame(frame);
    if (early) early.isOver = true;
    this.channel = await opening;
    if (signal.aborted) {
      this.send({ type: "bye", is_removed: true });
      return this.channel.close();
    }
    if (this.seq >= 0) this.send({ type: "ack", seq: this.seq });
    else this.hello();
    let pause = 2;
    let waited = 0;
    const clock = setInterval(() => {
      this.tick();
      const isMissed = this.seq < 0 || (!this.isOver && this.age > ASK_AFTER_S);
      if (!isMissed || this.lost || document.hidden) [waited, pause] = [0, 2];
      else if (++waited >= pause) {
        [waited, pause] = [0, pause * 2]; // on a kernel without subshells each question waits
        this.hello();
      }
    }, 1000);
    // A page that goes may come back: only what was removed from its notebook is of no use any more.
    window.addEventListener("pagehide", () => this.send({ type: "bye" }), { signal });
    signal.addEventListener("abort", () => {
      clearInterval(clock);
      this.send({ type: "bye", is_removed: true });
      this.channel?.close();
      this.shown?.dispose();
    });
    this.watchKernel();
  }

  /** @param {object} message */
  send(message) {
    if (!this.lost) this.channel?.send({ ...message, view: this.id });
  }

  hello() {
    this.seq = -1;
    const version = this.model.get("version");
    this.send({ type: "hello", has_code: PAGE.code.get(version)?.isLoading ?? false });
  }

  /** @param {Message} message @param {DataView[]} buffers */
  receive(message, buffers) {
    if (message.type === "code") takeCode(message.version, buffers);
    else if (message.type === "answer") this.shown?.answer(message);
    else if (message.type === "ended") this.ended = message.text;
    else if (message.type === "frame") {
      try {
        this.takeFrame(unpackedFrame(buffers[0]));
      } catch (error) {
        this.refused = `nbdist: ${error}`;
        this.tick();
      }
    }
  }

  /** @param {import("./types").Frame} frame */
  takeFrame(frame) {
    const { seq, kind } = frame.header;
    if (kind === "snapshot") {
      this.waiting = [];
      this.counts.snapshots++;
    } else if (this.seq < 0 || seq <= this.seq) return;
    else if (seq > this.seq + 1) {
      this.counts.gaps++;
      return this.hello();
    }
    this.seq = seq;
    this.seen = performance.now();
    this.ended = "";
    this.counts.frames++;
    this.waiting.push(frame);
    if (kind === "snapshot" || seq % ACK_EVERY === 0) this.send({ type: "ack", seq });
    void this.catchUp();
  }

  /** Give the views what has come; one at a time, since the code may have to be waited for. */
  async catchUp() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      if (!this.shown) {
        const code = await slot(this.model.get("version")).ready;
        await this.onScreen(); // BokehJS must not be laid out at size 0
        if (this.signal.aborted) return;
        this.shown = await code.views.show(this.box, code, {
          settings: this.model.get("settings"),
          order: (/** @type {object} */ order) => this.send({ type: "order", ...order }),
        });
        this.box.prepend(this.status);
      }
      for (const frame of this.waiting.splice(0)) this.shown.take(frame);
      this.tick();
    } catch (error) {
      this.status.textContent = `nbdist: cannot be drawn: ${error}`;
    } finally {
      this.isLoading = false;
    }
  }

  onScreen() {
    return new Promise((/** @type {(value?: unknown) => void} */ done) => {
      const watch = new IntersectionObserver((entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        watch.disconnect();
        done();
      });
      watch.observe(this.box);
      this.signal.addEventListener("abort", () => done());
    });
  }

  /** Of what is shown, in seconds. */
  get age() {
    return (performance.now() - this.seen) / 1000;
  }

  get isOver() {
    return this.shown?.isOver ?? this.waiting.some((frame) => !frame.header.is_live);
  }

  /** Say how old the data is. */
  tick() {
    const { age, isOver } = this;
    const isStale = Boolean(this.lost) || (!isOver && this.seen > 0 && age > STALE_AFTER_S);
    let text = "live";
    if (this.refused) text = this.refused;
    else if (this.lost) text = `${this.lost}; these are the last values`;
    else if (!this.seen) text = this.ended || "waiting for the kernel";
    else if (isOver) text = "the run is over";
    else if (isStale) text = `no data for ${Math.round(age)} s${this.ended && `: ${this.ended}`}`;
    this.box.classList.toggle("nbdist-stale", isStale);
    if (this.status.textContent !== text) this.status.textContent = text;
    this.shown?.setAge(isOver ? 0 : age);
  }

  /** When the kernel is gone, what is shown is all there is: keep it as a picture. */
  watchKernel() {
    const { model, signal } = this;
    /** @param {string} why */
    const lose = (why) => {
      if (this.lost) return;
      this.lost = why;
      this.tick();
      this.shown?.cut();
      this.freeze();
    };
    model.on("comm_live_update", () => lose("the kernel was restarted"));
    const session = model.widget_manager?.context?.sessionContext;
    if (!session) return;
    // Not on "unknown": a reconnection passes through it.
    const gone = ["restarting", "autorestarting", "dead", "terminating"];
    const onStatus = (/** @type {unknown} */ _, /** @type {string} */ status) => {
      if (gone.includes(status)) lose(`the kernel is ${status}`);
    };
    const onKernel = (/** @type {unknown} */ _, /** @type {any} */ change) => {
      if (change.newValue?.id === change.oldValue?.id) return;
      lose(change.newValue ? "the notebook has another kernel now" : "the kernel was shut down");
    };
    session.statusChanged.connect(onStatus);
    session.kernelChanged.connect(onKernel);
    signal.addEventListener("abort", () => {
      session.statusChanged.disconnect(onStatus);
      session.kernelChanged.disconnect(onKernel);
    });
  }

  freeze() {
    const picture = this.shown?.picture(); // at once: the view may be removed with its model
    if (!picture) return;
    const width = Math.round(picture.width / devicePixelRatio);
    const data = picture.toDataURL("image/png").split(",")[1];
    setTimeout(() => replaceOutputs(this.model, data, { "image/png": { width } }), 0);
  }
}

/** @param {{model: Model, el: HTMLElement, signal: AbortSignal}} props */
function render(props) {
  const view = new View(props);
  void view.open();
  (PAGE.views ??= new Set()).add(view);
  return () => PAGE.views?.delete(view);
}

export default { initialize, render };
