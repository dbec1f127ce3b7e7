// Types of the views' browser half, for tsc only.

export interface Model {
  get(name: string): any;
  on(name: string, callback: (...args: any[]) => void): void;
  off(name: string, callback: (...args: any[]) => void): void;
  send(message: object): void;
  widget_manager?: any;
}
export type Message =
  | { type: "code"; version: string }
  | { type: "frame" }
  | { type: "freeze"; metadata: object; picture: string }
  | { type: "thaw"; view: object }
  | { type: "ended"; text: string }
  | { type: "answer"; id: string; state: "taken" | "done" | "failed"; text: string };
export interface Code {
  Bokeh: any;
  views: {
    show(box: HTMLElement, code: Code, host: Host): Promise<Shown>;
    /** A picture of all charts, seen or not: of what is shown, or of frames that never were, and why no more came. */
    pictured(code: Code, host: Host, shown: Shown | null, frames: Frame[], lost: string): Promise<HTMLCanvasElement | null>;
  };
  figures: Record<string, any>;
}
/** An output of the notebook. */
export interface Held {
  outputs: any;
  output: any;
  data: Record<string, any>;
  /** Of the kernel, where the run was over when it was shown. */
  picture: string | undefined;
  metadata: Record<string, any>;
}
export interface Host {
  settings: Settings;
  order(order: object): void;
}
export interface Settings {
  colours: string[];
  dashes: string[];
  symbols: Record<string, string>;
  markers: Record<string, string>;
  views: string[];
  actions: string[];
}
export interface Shown {
  take(frame: Frame): void;
  answer(message: { id: string; state: string; text: string }): void;
  /** Another run beneath this one. */
  compare(title: string, tables: Record<string, Columns>): void;
  setAge(age: number): void;
  /** Nobody takes orders; why, in words. */
  cut(why: string): void;
  /** What is known, and the charts that are drawn, on one canvas. */
  picture(): HTMLCanvasElement | null;
  store: any;
  dispose(): void;
  isOver: boolean;
}
export interface Early {
  /** Of the view that takes them. */
  id: string;
  /** The kernel was asked for them. */
  isAsked: boolean;
  frames: Frame[];
  /** A view has taken them; it is sent those that follow itself. */
  isOver: boolean;
}
export interface Page {
  code: Map<string, CodeSlot>;
  early: Map<string, Early>;
  views?: Set<unknown>;
}
export interface CodeSlot {
  ready: Promise<Code>;
  resolve(code: Code): void;
  reject(error: unknown): void;
  isLoading: boolean;
}
export interface Channel {
  isDirect: boolean;
  send(message: object): void;
  close(): void;
}
export type Numbers = Float32Array | Float64Array;
export type Columns = Record<string, Numbers>;
export interface Seat {
  slot: number;
  rank: number | null;
  state: string;
  pid: number | null;
  host: string;
  device: string;
  generation: number;
  memory_bytes: number;
  activity: string;
  slow_factor: number;
  num_not_restored: number;
  /** No sign of life for so long; 0: there is. */
  silent_s: number;
}
export interface World {
  phase: string;
  generation: number;
  world_size: number;
  size: number;
  healthy: boolean;
  reason: string;
  seats: Seat[];
}
export interface Run {
  run: string;
  name: string;
  state: string;
  first: number;
  step: number;
  target: number;
  durable: number;
  until: number | null;
  usual_s: number;
  fault: string;
  samples: number;
  seconds: number;
}
export interface Incident {
  kind: string;
  slots: number[];
  ranks: number[];
  cause: string;
  began_at: number | null;
  step: number | null;
  generation_before: number;
  generation_after: number | null;
  detect_s: number | null;
  regroup_s: number | null;
  restore_s: number | null;
  stall_s: number | null;
  steps_repeated: number;
  samples_lost: number;
  samples_repeated: number;
  not_restored: Record<string, string>;
  reason: string;
}
export interface Header {
  schema: number;
  seq: number;
  kind: "snapshot" | "delta";
  clock_s: number;
  cluster: string;
  run: Run | null;
  is_live: boolean;
  world: World;
  incidents: { number: number; incident: Incident }[];
  evaluations: { step: number; at: number; metrics: Record<string, number | null> }[];
  counters: Record<string, number>;
  thinned: string[];
  columns: [string, "f4" | "f8", number, number][];
}
export interface Frame {
  header: Header;
  tables: Record<string, Columns>;
}
declare global {
  // eslint-disable-next-line no-var
  var STYLES: string;
}
