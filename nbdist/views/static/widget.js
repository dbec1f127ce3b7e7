// The widget's own half in the page: brings the code once per page, keeps the connection, freezes.
//
// Loaded by anywidget once per widget instance, so it is small (it is stored with the widget's
// state) and shares what a page needs once through one key of `globalThis`. BokehJS and the views
// come as binary messages, which are never stored.

import { unpacked, unpackedBytes, unpackedFrame } from "./frame.js";
import { forget, keep, kept } from "./kept.js";

/** @typedef {import("./types").Model} Model */
/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").Code} Code */
/** @typedef {import("./types").Shown} Shown */
/** @typedef {import("./types").Early} Early */

const SHARED = /** @type {Record<symbol, import("./types").Page>} */ (/** @type {unknown} */ (globalThis));
const PAGE = (SHARED[Symbol.for("nbdist")] ??= { code: new Map(), early: new Map() });

const WIDGET_VIEW = "application/vnd.jupyter.widget-view+json";
/** Of JupyterLab: a change of what is saved that is not drawn. */
const SILENT_CHANGE = "silent-change";
const MAX_EARLY = 240;
const OPEN_LIMIT_MS = 1500;
const STALE_AFTER_S = 3;
const ASK_AFTER_S = 10;
const ACK_EVERY = 4;
const FREEZE_AFTER_MS = 300;
/** A view that is on the page is rendered by then. */
const RENDER_LIMIT_MS = 10_000;
/** The kernel has answered by then, if it is idle. */
const ANSWER_LIMIT_MS = 300;
/** For the code, and for a picture of all charts; then what was seen has to do. */
const FREEZE_LIMIT_MS = 4000;

/**
 * Which process of a kernel a message is of; "" where it does not say: what the server itself says in a kernel's name,
 * that it restarts or is dead, has a name of its own.
 * @param {any} message
 */
function processOf({ header, content }) {
  const isOwn = header.msg_type === "comm_msg" || ["busy", "idle"].includes(content?.execution_state);
  return isOwn ? header.session : "";
}

/** @param {number} limit_ms @returns {Promise<null>} */
const after = (limit_ms) => new Promise((done) => setTimeout(() => done(null), limit_ms));

/** Run a module from the parts of its text. @param {BlobPart[]} parts @returns {Promise<any>} */
async function imported(...parts) {
  const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
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
  const [text, ours, json] = await Promise.all([unpackedBytes(bokeh), unpackedBytes(views), unpacked(figures)]);
  const [{ default: Bokeh }, module] = await Promise.all([
    imported("const root={};(function(){", text, "\n}).call(root);export default root.Bokeh;"),
    imported(ours),
  ]);
  Bokeh.set_log_level("error"); // it warns of ranges without data, which all have at first
  return { Bokeh, views: module, figures: JSON.parse(json) };
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

/** @param {string} version @param {DataView[]} buffers @param {boolean} [isNew] the tab does not keep it yet */
function takeCode(version, buffers, isNew = true) {
  const entry = slot(version);
  if (entry.isLoading) return;
  entry.isLoading = true;
  const loading = loaded(buffers);
  loading.then(entry.resolve, entry.reject);
  loading.then(() => isNew && keep(version, buffers), forget);
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
  await Promise.race([comm.subshellStarted ?? 0, without, after(OPEN_LIMIT_MS)]);
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

/** Of the open notebook. @param {Model} model @returns {import("./types").Held[]} */
function outputs(model) {
  const cells = model.widget_manager?.context?.model?.cells;
  const found = [];
  for (let i = 0; i < (cells?.length ?? 0); i++) {
    const outputs = cells.get(i).outputs;
    for (let j = 0; j < (outputs?.length ?? 0); j++) {
      const output = outputs.get(j);
      const { data, metadata } = output.toJSON();
      found.push({ outputs, output, data: data ?? {}, picture: data?.["image/png"], metadata });
    }
  }
  return found;
}

/**
 * Outputs that hold this widget. An update by display id reaches only pages that saw the display
 * itself, not one that was loaded again.
 * @param {Model} model
 */
function held(model) {
  return outputs(model).filter(({ data }) => data[WIDGET_VIEW]?.model_id === model.get("own_model_id"));
}

/** Outputs in which a picture took its place. @param {Model} model */
function frozen(model) {
  return outputs(model).filter(({ metadata }) => metadata?.nbdist?.widget === model.get("own_model_id"));
}

/**
 * Put text and picture there, unless something else has come there since.
 * @param {Model} model @param {import("./types").Held} place @param {string} picture base64 @param {object} metadata
 */
function replace(model, place, picture, metadata) {
  put(place, { "text/plain": model.get("text"), "image/png": picture }, metadata);
}

/** @param {import("./types").Held} place @param {object} data @param {object} metadata */
function put({ outputs, output }, data, metadata) {
  for (let j = 0; j < outputs.length; j++) {
    if (outputs.get(j) === output) return outputs.set(j, { output_type: "display_data", data, metadata });
  }
}

/**
 * A run that is over needs no page to wait for it: the file holds its picture, and the view lives on in
 * this page only. With the view in the file, whoever opens it when the kernel is gone would be told of a
 * missing model: front ends prefer a widget, whatever stands beside it. Told to what is saved alone;
 * the application writes its own changes there under the same name.
 * @param {Model} model
 */
function savePicture(model) {
  const own_id = model.get("own_model_id");
  const { cells } = model.widget_manager?.context?.model ?? {};
  for (let i = 0; i < (cells?.length ?? 0); i++) {
    const saved = cells.get(i).sharedModel;
    (saved?.outputs ?? []).forEach((/** @type {any} */ output, /** @type {number} */ j) => {
      const { [WIDGET_VIEW]: view, ...data } = output.data ?? {};
      if (view?.model_id !== own_id || !data["image/png"]) return;
      const metadata = { ...output.metadata, nbdist: { widget: own_id } };
      saved.updateOutputs?.(j, j + 1, [{ ...output, data, metadata }], SILENT_CHANGE);
    });
  }
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

/**
 * Listens, and asks: anywidget delivers nothing before it returns, and gives up for ever after 2 s,
 * so nothing is waited for.
 * @param {{model: Model}} props
 */
function initialize({ model }) {
  const version = model.get("version");
  /** @type {Early} */
  const early = { id: newId(), frames: [], isOver: false, isAsked: false };
  PAGE.early.set(model.get("widget_id"), early);
  /** @type {ReturnType<typeof setTimeout>} */ let turning;
  model.on("msg:custom", (/** @type {Message} */ message, /** @type {DataView[]} */ buffers) => {
    if (message.type === "code") takeCode(message.version, buffers);
    else if (message.type === "freeze") {
      // The update by display id has the first chance: it also reaches the kernel's own record.
      const freeze = () => held(model).forEach((place) => replace(model, place, message.picture, message.metadata));
      clearTimeout(turning);
      turning = setTimeout(freeze, FREEZE_AFTER_MS);
    } else if (message.type === "thaw") {
      const data = { "text/plain": model.get("text"), ...message.view };
      clearTimeout(turning);
      turning = setTimeout(() => frozen(model).forEach((place) => put(place, data, {})), FREEZE_AFTER_MS);
    } else if (message.type === "frame" && !early.isOver) {
      const frame = unpackedFrame(buffers[0]);
      if (frame.header.kind === "snapshot") early.frames = [frame];
      else if (early.frames.length) early.frames.push(frame);
      if (early.frames.length > MAX_EARLY) early.frames = [];
    }
  });
  const known = slot(version).isLoading ? null : kept(version);
  if (known) takeCode(version, known, false);
  // A page that is loaded again has seen no display: it asks before it has a place to draw in. What
  // is not in its notebook will not be rendered, and what is far out of sight may not be.
  if (!held(model).length) return;
  early.isAsked = true;
  model.send({ type: "hello", view: early.id, is_early: true, has_code: slot(version).isLoading });
  setTimeout(() => {
    if (early.isOver) return;
    early.frames = [];
    model.send({ type: "bye", view: early.id });
  }, RENDER_LIMIT_MS);
}

/** One view of the widget on the page. */
class View {
  /** @param {{model: Model, el: HTMLElement, signal: AbortSignal}} props */
  constructor({ model, el, signal }) {
    this.model = model;
    this.signal = signal;
    const early = PAGE.early.get(model.get("widget_id"));
    this.id = early && !early.isOver ? early.id : newId();
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
    /** @type {() => void} */ this.arrived = () => {};
    /** A frame has come. */ this.first = new Promise((/** @type {(value?: unknown) => void} */ done) => (this.arrived = done));
    /** Charts without data are made while the kernel answers. */
    this.making = this.make();
    this.making.catch(() => {}); // whoever waits for it says so
    /** @type {import("./types").Channel | null} */ this.channel = null;
    this.counts = { frames: 0, gaps: 0, snapshots: 0 };
  }

  async open() {
    const { model, signal } = this;
    const opening = channel(model, (message, buffers) => this.receive(message, buffers));
    const early = PAGE.early.get(model.get("widget_id"));
    const isAsked = early?.isAsked && !early.isOver;
    for (const frame of early?.frames.splice(0) ?? []) this.takeFrame(frame);
    if (early) early.isOver = true;
    savePicture(model);
    this.channel = await opening;
    if (isAsked && this.seq < 0) await Promise.race([this.first, after(ANSWER_LIMIT_MS)]);
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
    else if (message.type === "ended") {
      this.ended = message.text;
      void this.catchUp();
    }
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
    this.arrived();
    this.waiting.push(frame);
    if (kind === "snapshot" || seq % ACK_EVERY === 0) this.send({ type: "ack", seq });
    void this.catchUp();
  }

  async make() {
    const code = await slot(this.model.get("version")).ready;
    await this.onScreen(); // BokehJS must not be laid out at size 0
    if (this.signal.aborted) return;
    this.shown = await code.views.show(this.box, code, {
      settings: this.model.get("settings"),
      order: (/** @type {object} */ order) => this.send({ type: "order", ...order }),
    });
    this.box.prepend(this.status);
  }

  /** Give the views what has come; one at a time, since the code may have to be waited for. */
  async catchUp() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      await this.making;
      for (const frame of this.shown ? this.waiting.splice(0) : []) this.shown?.take(frame);
      if (this.ended && !this.isOver) this.shown?.cut(this.ended); // until frames come again
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
    const { shown, waiting } = this;
    return shown?.store.header ? shown.isOver : waiting.some((frame) => !frame.header.is_live);
  }

  /** Why nothing new will come. */
  get note() {
    return `${this.lost || this.ended}; these are the last values`;
  }

  /** Say how old the data is. */
  tick() {
    const { age, isOver } = this;
    const isStale = Boolean(this.lost || (this.ended && !isOver)) || (!isOver && this.seen > 0 && age > STALE_AFTER_S);
    let text = this.shown?.store.isPaused ? "paused" : "live";
    if (this.refused) text = this.refused;
    else if (this.lost) text = this.note;
    else if (!this.seen) text = this.ended || "waiting for the kernel";
    else if (isOver) text = "the run is over";
    else if (this.ended) text = this.note;
    else if (isStale) text = `no data for ${Math.round(age)} s`;
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
      this.shown?.cut(why);
      void this.freeze();
    };
    model.on("comm_live_update", () => lose("the kernel was restarted"));
    const session = model.widget_manager?.context?.sessionContext;
    if (!session) return;
    // Not on "unknown": a reconnection passes through it.
    const gone = new Map([
      ["restarting", "the kernel was restarted"],
      ["autorestarting", "the kernel died and was restarted"],
      ["dead", "the kernel died"],
      ["terminating", "the kernel was shut down"],
    ]);
    const onStatus = (/** @type {unknown} */ _, /** @type {string} */ status) => {
      const why = gone.get(status);
      if (why) lose(why);
    };
    const onKernel = (/** @type {unknown} */ _, /** @type {any} */ change) => {
      if (change.newValue?.id === change.oldValue?.id) return;
      lose(change.newValue ? "the notebook has another kernel now" : "the kernel was shut down");
    };
    let process = "";
    // Where somebody else restarts it, this page is told nothing, but by what the new one says.
    const onSaid = (/** @type {unknown} */ _, /** @type {any} */ message) => {
      const its = processOf(message);
      if (its && process && its !== process) lose("the kernel was restarted");
      process = its || process;
    };
    session.statusChanged.connect(onStatus);
    session.kernelChanged.connect(onKernel);
    session.iopubMessage?.connect(onSaid);
    signal.addEventListener("abort", () => {
      session.statusChanged.disconnect(onStatus);
      session.kernelChanged.disconnect(onKernel);
      session.iopubMessage?.disconnect(onSaid);
    });
  }

  /** A picture in the place of this view: the kernel's of a run that is over, else one drawn here. */
  async freeze() {
    const { model } = this;
    const places = held(model); // at once, and so is this: the view may be removed with its model
    const seen = this.shown?.picture() ?? null;
    await after(0);
    const bare = places.filter((place) => !place.picture);
    for (const place of places) if (place.picture) replace(model, place, place.picture, place.metadata);
    const picture = bare.length ? await this.wholePicture(seen) : null;
    if (!picture) return;
    const metadata = { "image/png": { width: Math.round(picture.width / devicePixelRatio) } };
    const data = picture.toDataURL("image/png").split(",")[1];
    for (const place of bare) replace(model, place, data, metadata);
  }

  /**
   * Of all charts, also those that were never seen. A hidden page draws nothing: there it is what was
   * seen, and where nothing was, it waits to be looked at.
   * @param {HTMLCanvasElement | null} seen @returns {Promise<HTMLCanvasElement | null>}
   */
  async wholePicture(seen) {
    const code = await Promise.race([slot(this.model.get("version")).ready, after(FREEZE_LIMIT_MS)]);
    if (!code || (document.hidden && seen)) return seen;
    while (document.hidden) await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    const host = { settings: this.model.get("settings"), order: () => {} };
    const drawing = code.views.pictured(code, host, this.shown, this.waiting, this.lost);
    return (await Promise.race([drawing.catch(() => null), after(FREEZE_LIMIT_MS)])) ?? seen;
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
