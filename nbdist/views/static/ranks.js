// The rank table with its buttons, and the controls of the run.

import { element, median, ms, NONE, percent, size } from "./format.js";
import { recent } from "./throughput.js";

/** @typedef {import("./store.js").Store} Store */
/** @typedef {import("./types").Seat} Seat */

const QUEUED_AFTER_MS = 600;
/** What was done is said for so long; what failed, until something else is said. */
const SAID_MS = 8000;
const SLOW_FACTOR = 5;
const HEADER = ["rank", "slot", "state", "gen", "device", "pid", "compute ms", "waiting", "memory", ""];
const RECENT = "Median of the last steps: those of 4 s, but 5 to 50 of them";
/** @type {Record<string, string>} */
const TITLES = { "compute ms": RECENT, waiting: RECENT };

/** Orders on their way: what was asked, and what became of it. */
export class Orders {
  /** @param {(order: object) => void} send @param {HTMLElement} place where answers are shown */
  constructor(send, place) {
    this.send = send;
    this.place = place;
    this.prefix = Math.random().toString(36).slice(2);
    this.count = 0;
    /** @type {Map<string, {words: string, done: () => void, timer: ReturnType<typeof setTimeout>}>} */
    this.open = new Map();
    /** @type {ReturnType<typeof setTimeout> | undefined} */ this.leaving = undefined;
  }

  /**
   * @param {string} action @param {object} values @param {string} words what it is, for people
   * @param {HTMLButtonElement} button
   */
  give(action, values, words, button) {
    const id = `${this.prefix}-${this.count++}`;
    button.disabled = true;
    button.setAttribute("aria-busy", "true");
    const done = () => {
      button.disabled = false;
      button.removeAttribute("aria-busy");
    };
    const timer = setTimeout(() => {
      this.say(`${words}: queued, the kernel is busy; it acts when the cell ends`, "queued");
    }, QUEUED_AFTER_MS);
    this.open.set(id, { words, done, timer });
    this.say(`${words} …`, "sent");
    this.send({ id, action, ...values });
  }

  /** @param {{id: string, state: string, text: string}} answer */
  answer({ id, state, text }) {
    const order = this.open.get(id);
    if (!order) return;
    clearTimeout(order.timer);
    if (state === "taken") return this.say(`${order.words}: under way`, state);
    this.open.delete(id);
    order.done();
    this.say(state === "done" ? `${order.words}: done` : `${order.words}: ${text}`, state);
  }

  /** @param {string} text @param {string} state */
  say(text, state) {
    clearTimeout(this.leaving);
    this.place.textContent = text;
    this.place.dataset.state = state;
    if (state === "done") this.leaving = setTimeout(() => this.say("", ""), SAID_MS);
  }

  dispose() {
    clearTimeout(this.leaving);
    for (const { timer } of this.open.values()) clearTimeout(timer);
  }
}

export class Ranks {
  /**
   * @param {HTMLElement} parent @param {import("./charts.js").Look} look
   * @param {(order: object) => void} send @param {string[]} actions that the session offers
   */
  constructor(parent, look, send, actions) {
    this.look = look;
    this.actions = actions;
    this.root = parent.appendChild(element("section", "nbdist-panel nbdist-ranks"));
    this.root.setAttribute("aria-label", "Who is in the job?");
    const head = this.root.appendChild(element("div", "nbdist-head"));
    head.append(element("h3", "", "Who is in the job?"));
    const bar = head.appendChild(element("span", "nbdist-controls"));
    this.answers = element("p", "nbdist-answer");
    this.answers.setAttribute("role", "status");
    this.orders = new Orders(send, this.answers);
    /** @type {Map<string, HTMLButtonElement>} */ this.controls = new Map();
    for (const [action, label, title] of CONTROLS) {
      if (!actions.includes(action)) continue;
      const button = bar.appendChild(element("button", "nbdist-button", label));
      button.type = "button";
      button.title = title;
      button.disabled = true; // until it is known that somebody takes orders
      button.addEventListener("click", () => this.orders.give(action, {}, label, button));
      this.controls.set(action, button);
    }
    this.root.append(this.answers);
    const scroller = this.root.appendChild(element("div", "nbdist-scroller"));
    this.table = scroller.appendChild(element("table", "nbdist-table"));
    const line = this.table.appendChild(element("thead")).appendChild(element("tr"));
    for (const name of HEADER) {
      const cell = line.appendChild(element("th", "", name));
      cell.scope = "col";
      cell.title = TITLES[name] ?? "";
    }
    this.body = this.table.appendChild(element("tbody"));
    /** @type {Map<number, Row>} */ this.rows = new Map();
  }

  /** Until frames come again. */
  cut() {
    for (const button of this.root.querySelectorAll("button")) button.disabled = true;
    this.orders.dispose();
  }

  /** @param {Store} store */
  update(store) {
    const { world, run } = store;
    if (!world) return;
    const state = run?.state ?? "";
    const isOn = ["running", "recovering", "paused"].includes(state) && store.isLive;
    for (const [action, button] of this.controls) {
      const fits = action === "resume" ? state === "paused" : action !== "pause" || state !== "paused";
      if (!button.hasAttribute("aria-busy")) button.disabled = !isOn || !fits;
    }
    const times = recent(store);
    for (const seat of world.seats) {
      let row = this.rows.get(seat.slot);
      if (!row) {
        row = new Row(this, seat.slot);
        this.rows.set(seat.slot, row);
        const after = [...this.rows.values()].find((other) => other.slot > seat.slot);
        this.body.insertBefore(row.line, after?.line ?? null);
      }
      row.update(seat, times.get(seat.slot), store.isLive);
    }
    const slots = new Set(world.seats.map((seat) => seat.slot));
    for (const [slot, row] of this.rows) {
      if (slots.has(slot)) continue;
      row.line.remove();
      this.rows.delete(slot);
    }
  }
}

/** One seat's row; cells are changed in place, so that a button under the pointer stays. */
class Row {
  /** @param {Ranks} ranks @param {number} slot */
  constructor(ranks, slot) {
    this.ranks = ranks;
    this.slot = slot;
    /** @type {Seat | null} */ this.seat = null;
    this.line = element("tr");
    this.cells = HEADER.slice(0, -1).map(() => this.line.appendChild(element("td")));
    const last = this.line.appendChild(element("td", "nbdist-actions"));
    /** @type {Map<string, HTMLButtonElement>} */ this.buttons = new Map();
    for (const [action, label, title] of SEAT_ACTIONS) {
      if (!ranks.actions.includes(action)) continue;
      const button = last.appendChild(element("button", "nbdist-button", label));
      button.type = "button";
      button.title = title;
      button.addEventListener("click", () => this.act(action, button));
      this.buttons.set(action, button);
    }
  }

  /** @param {string} action @param {HTMLButtonElement} button */
  act(action, button) {
    const { seat } = this;
    if (!seat) return;
    const values = { slot: seat.slot, pid: seat.pid, factor: seat.slow_factor > 1 ? 1 : SLOW_FACTOR };
    this.ranks.orders.give(action, values, `${button.textContent} rank ${seat.rank}`, button);
  }

  /** @param {Seat} seat @param {{compute: number[], waits: number[]} | undefined} times @param {boolean} isLive */
  update(seat, times, isLive) {
    this.seat = seat;
    const slowed = seat.slow_factor > 1 ? `, slowed × ${seat.slow_factor}` : "";
    const silent = seat.silent_s > 0 ? ` · silent for ${seat.silent_s} s` : "";
    const state = `${seat.state}${slowed}${silent || (seat.activity && ` · ${seat.activity}`)}`;
    const values = [
      seat.rank === null ? NONE : `${seat.rank}`,
      `${seat.slot}`,
      state,
      seat.generation ? `${seat.generation}` : NONE,
      seat.device,
      seat.pid === null ? NONE : `${seat.pid}`,
      ms(median(times?.compute ?? [])),
      percent(median(times?.waits ?? [])),
      size(seat.memory_bytes),
    ];
    values.forEach((value, i) => {
      if (this.cells[i].textContent !== value) this.cells[i].textContent = value;
    });
    this.cells[1].style.setProperty("--nbdist-slot", this.ranks.look.colour(seat.slot));
    this.cells[1].className = "nbdist-swatch";
    this.line.dataset.state = seat.state;
    for (const [action, button] of this.buttons) {
      if (action === "slow") button.textContent = seat.slow_factor > 1 ? "Unslow" : "Slow";
      if (!button.hasAttribute("aria-busy")) button.disabled = !isLive || seat.rank === null;
    }
  }
}

const CONTROLS = [
  ["pause", "Pause", "Stand at the next step boundary"],
  ["resume", "Resume", "Go on"],
  ["step", "Step", "Train one more step, then pause"],
  ["stop_run", "Stop run", "End it at the next step boundary"],
];
const SEAT_ACTIONS = [
  ["kill", "Kill", "SIGKILL: the engine ends at once, and its seat is filled again"],
  ["stop", "Stop", "SIGSTOP: the engine hangs, until it is found hung and replaced"],
  ["slow", "Slow", `Make its steps ${SLOW_FACTOR} times as long, or end that`],
];
