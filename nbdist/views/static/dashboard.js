// All views of one dashboard: lays them out, feeds them, draws what is seen.

import { Agreement } from "./agreement.js";
import { Look } from "./charts.js";
import { element, number } from "./format.js";
import { Distance } from "./distance.js";
import { Loss } from "./loss.js";
import { Membership } from "./membership.js";
import { Memory } from "./memory.js";
import { Overview, summary } from "./overview.js";
import { Pipeline } from "./pipeline.js";
import { Ranks } from "./ranks.js";
import { Sent } from "./sent.js";
import { Store } from "./store.js";
import { Sync } from "./sync.js";
import { Throughput } from "./throughput.js";
import { Traffic } from "./traffic.js";

const PANELS = /** @type {const} */ ({
  sync: Sync,
  pipeline: Pipeline,
  throughput: Throughput,
  loss: Loss,
  traffic: Traffic,
  bytes: Sent,
  memory: Memory,
  distance: Distance,
  agreement: Agreement,
  membership: Membership,
});
const LAST_VALUES = "These are the last values.";
const GAP = 8;
const LINE_PX = 22;
/** Width of a picture of all charts, on the page. */
const PICTURE_PX = 960;
/** A chart that has been given its values is laid out, has its height changed, and is painted. */
const SETTLING_FRAMES = 8;

/** Implements `Shown` of types.d.ts. */
class Dashboard {
  /** @param {HTMLElement} box @param {import("./types").Code} code @param {import("./types").Host} host */
  constructor(box, code, host) {
    this.store = new Store();
    this.box = box;
    this.style = document.head.appendChild(element("style"));
    this.style.textContent = STYLES;
    const { settings } = host;
    const shows = (/** @type {string} */ name) => settings.views.includes(name);
    this.look = new Look(settings, box);
    this.overview = shows("overview") ? new Overview(box) : null;
    this.ranks = shows("ranks") ? new Ranks(box, this.look, host.order, settings.actions) : null;
    const grid = box.appendChild(element("div", "nbdist-grid"));
    this.panels = Object.entries(PANELS)
      .filter(([name]) => shows(name))
      .map(([, kind]) => new kind(grid, code, this.look));
    this.choose();
    this.missing = box.appendChild(element("p", "nbdist-missing"));
    /** @type {Set<Element>} */ this.seen = new Set();
    this.frame = 0;
    this.isDisposed = false;
    this.watchVisibility();
    this.watchTheme();
  }

  /**
   * Gradient sync is no business of a pipeline's, nor the other way round, where both are wanted. Where ranks
   * are not apart, no replicas were compared, or nothing is known of what was sent, and more is wanted, nothing is
   * said of it.
   */
  choose() {
    const one = (/** @type {string} */ name) => this.panels.find((panel) => panel.name === name);
    const { distance, agreement, sent } = this.store;
    for (const [name, table] of Object.entries({ distance, agreement, bytes: sent })) {
      const panel = one(name);
      if (panel && this.panels.length > 1) panel.root.hidden = !table.length;
    }
    const [sync, pipeline] = [one("sync"), one("pipeline")];
    if (!sync || !pipeline) return;
    sync.root.hidden = this.store.isPipeline;
    pipeline.root.hidden = !this.store.isPipeline;
  }

  /** Those of this run. */
  get chosen() {
    return this.panels.filter((panel) => !panel.root.hidden);
  }

  /** Windowed notebooks detach what is off screen, hidden tabs have size 0: draw what is seen. */
  watchVisibility() {
    this.visibility = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) this.seen.add(entry.target);
        else this.seen.delete(entry.target);
      }
      void this.mountSeen();
      this.schedule();
    });
    for (const target of [this.box, ...this.panels.map((panel) => panel.root)]) {
      this.visibility.observe(target);
    }
    this.onVisible = () => this.schedule();
    document.addEventListener("visibilitychange", this.onVisible);
  }

  async mountSeen() {
    // Together: what each causes the page to lay out is laid out once.
    const waiting = this.panels.filter((panel) => this.seen.has(panel.root) && !panel.isReady);
    await Promise.all(waiting.map((panel) => panel.mount()));
    this.schedule();
  }

  watchTheme() {
    this.theme = new MutationObserver(() => {
      for (const panel of this.panels) for (const chart of panel.charts) chart.repaint();
      this.schedule();
    });
    this.theme.observe(document.body, {
      attributes: true,
      attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"],
    });
  }

  /** @param {import("./types").Frame} frame */
  take(frame) {
    const isFirst = !this.store.header;
    this.store.take(frame);
    this.choose();
    if (isFirst) this.drawNumbers(); // at once: making charts takes longer than all else
    this.schedule();
  }

  drawNumbers() {
    this.overview?.update(this.store);
    this.ranks?.update(this.store);
  }

  /** At most once in an animation frame, and only while the page is looked at. */
  schedule() {
    if (this.frame || document.hidden || this.isDisposed || !this.store.header) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    if (this.isDisposed || !this.seen.has(this.box)) return;
    this.drawNumbers();
    for (const panel of this.panels) if (this.seen.has(panel.root)) panel.update(this.store);
    const { missing = 0, dropped = 0, delayed = 0 } = this.store.header?.counters ?? {};
    const lost = Math.max(missing, dropped);
    const words = [lost ? `${number(lost)} telemetry ${lost === 1 ? "record was" : "records were"} lost` : "", delayed ? `${number(delayed)} ${delayed === 1 ? "frame" : "frames"} waited for this page` : ""];
    const text = words.filter(Boolean).join("; ");
    if (this.missing.textContent !== text) this.missing.textContent = text;
  }

  /** Another run beneath this one. @param {string} title @param {Record<string, import("./types").Columns>} tables */
  compare(title, tables) {
    for (const panel of this.panels) {
      if (panel instanceof Loss) panel.compare(title, tables.rows ?? {});
      if (panel instanceof Sent) panel.compare(title, tables);
    }
  }

  /** @param {{id: string, state: string, text: string}} message */
  answer(message) {
    this.ranks?.orders.answer(message);
  }

  /** Nobody takes orders. @param {string} why in words */
  cut(why) {
    this.store.lost = why;
    this.drawNumbers();
    this.ranks?.cut();
  }

  get isOver() {
    return this.store.isOver;
  }

  /** How old what is shown is. @param {number} age in s */
  setAge(age) {
    const now = this.store.isPaused ? "paused" : "live";
    const text = this.isOver ? "" : age < 2 ? now : `${Math.round(age)} s old`;
    for (const panel of this.panels) panel.setAge(text);
  }

  /**
   * What is known and all charts on one canvas, two beside one another.
   * @returns {HTMLCanvasElement | null}
   */
  picture() {
    const { ground, text } = this.look;
    const parts = this.chosen.map((panel) => panel.picture(ground, text));
    const canvases = parts.flatMap((part) => (part ? [part] : []));
    const pairs = canvases.flatMap((_, i) => (i % 2 ? [] : [canvases.slice(i, i + 2)]));
    const gap = GAP * devicePixelRatio;
    const lines = [...summary(this.store), this.store.lost && LAST_VALUES].filter(Boolean);
    const head = 2 * gap + lines.length * LINE_PX * devicePixelRatio;
    const wide = pairs.map((pair) => pair.reduce((sum, canvas) => sum + canvas.width + gap, gap));
    const high = pairs.map((pair) => Math.max(...pair.map((canvas) => canvas.height)) + gap);
    const made = document.createElement("canvas");
    made.width = Math.max(PICTURE_PX * devicePixelRatio, ...wide);
    made.height = head + high.reduce((sum, height) => sum + height, 0);
    const pen = made.getContext("2d");
    if (!pen) return null;
    pen.fillStyle = ground;
    pen.fillRect(0, 0, made.width, made.height);
    pen.fillStyle = text;
    pen.textBaseline = "middle";
    lines.forEach((line, i) => {
      pen.font = `${i ? 400 : 600} ${(i ? 13 : 16) * devicePixelRatio}px system-ui, sans-serif`;
      pen.fillText(line, 2 * gap, gap + (i + 0.5) * LINE_PX * devicePixelRatio, made.width - 4 * gap);
    });
    let y = head;
    pairs.forEach((pair, i) => {
      pair.forEach((canvas, j) => pen.drawImage(canvas, gap + j * (pair[0].width + gap), y));
      y += high[i];
    });
    return made;
  }

  /** Have all charts drawn, whether they are seen or not. */
  async drawAll() {
    this.choose();
    await Promise.all(this.chosen.map((panel) => panel.mount()));
    for (const panel of this.chosen) panel.update(this.store);
    for (let i = 0; i < SETTLING_FRAMES; i++) await new Promise((next) => requestAnimationFrame(next));
  }

  dispose() {
    this.isDisposed = true;
    cancelAnimationFrame(this.frame);
    this.visibility?.disconnect();
    this.theme?.disconnect();
    if (this.onVisible) document.removeEventListener("visibilitychange", this.onVisible);
    this.ranks?.orders.dispose();
    for (const panel of this.panels) panel.dispose();
    this.style.remove();
  }
}

/**
 * Called by the page once the code is there.
 * @param {HTMLElement} box @param {import("./types").Code} code @param {import("./types").Host} host
 * @returns {Promise<import("./types").Shown>}
 */
export async function show(box, code, host) {
  return new Dashboard(box, code, host);
}

/**
 * A picture of all charts, made where nobody sees it; `Code` of types.d.ts says of what.
 * @param {import("./types").Code} code @param {import("./types").Host} host
 * @param {import("./types").Shown | null} shown @param {import("./types").Frame[]} frames @param {string} lost
 */
export async function pictured(code, { settings, order }, shown, frames, lost) {
  const box = document.body.appendChild(element("div", "nbdist nbdist-pictured"));
  box.style.width = `${PICTURE_PX}px`;
  const views = settings.views.filter((name) => name in PANELS);
  const made = new Dashboard(box, code, { settings: { ...settings, views }, order });
  try {
    if (shown) made.store = shown.store;
    for (const frame of frames) made.store.take(frame);
    if (!made.store.header) return null;
    made.store.lost = lost;
    await made.drawAll();
    return made.picture();
  } finally {
    made.dispose();
    box.remove();
  }
}
