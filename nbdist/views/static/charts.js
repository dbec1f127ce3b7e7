// A bokeh figure on the page: filled by us, drawn only while it is seen.

/** Of a slot that is black on light pages; white bars would outshine all others. */
const PALE = "#b9bec4";
/** Of a line of text. */
const NAME_PX = 13;

/** One look for a slot everywhere. */
export class Look {
  /** @param {import("./types").Settings} settings @param {HTMLElement} box */
  constructor(settings, box) {
    this.settings = settings;
    this.box = box;
  }

  /** Black is for light pages only. @param {number} slot */
  colour(slot) {
    const { colours } = this.settings;
    const colour = colours[slot % colours.length];
    return colour === "#000000" && this.isDark ? PALE : colour;
  }

  /** Text is bright. */
  get isDark() {
    const [red, green, blue] = (this.text.match(/[\d.]+/g) ?? []).map(Number);
    return red + green + blue > 384;
  }

  /** @param {number} slot */
  dash(slot) {
    const { colours, dashes } = this.settings;
    return dashes[Math.floor(slot / colours.length) % dashes.length];
  }

  get text() {
    return getComputedStyle(this.box).color || "#1b1f24";
  }

  get ground() {
    return getComputedStyle(this.box).getPropertyValue("--nbdist-ground").trim() || "#ffffff";
  }

  /** Cividis at 0 … 1, by eleven of its colours. @param {number} share */
  heat(share) {
    const scale = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74"];
    scale.push("#c3b369", "#e1cc55", "#fee838");
    return scale[Math.max(0, Math.min(9, Math.round(share * 9)))];
  }
}

export class Chart {
  /**
   * @param {import("./types").Code} code @param {string} name of the figure
   * @param {HTMLElement} place in which it is drawn
   */
  constructor(code, name, place) {
    this.code = code;
    this.place = place;
    this.item = code.figures[name];
    /** @type {any} */ this.views = null;
    /** @type {any} */ this.document = null;
    /** @type {Record<string, any>} */ this.sources = {};
    /** @type {any} */ this.figure = null;
    this.isMounting = false;
    /** The rows that are set. */ this.laned = "";
  }

  /** BokehJS lays out badly at size 0: called when the place is seen. */
  async mount() {
    if (this.isMounting || !this.place.isConnected) return; // it may be removed while it waits
    this.isMounting = true;
    try {
      this.views = await this.code.Bokeh.embed.embed_item(this.item, this.place);
    } catch (error) {
      if (this.place.isConnected) throw error;
      return; // it was removed meanwhile, as by a cell that runs again
    }
    this.figure = this.views.roots[0].model;
    this.document = this.figure.document;
    // What is told where the pointer is hangs at the page's body, out of reach of our styles.
    const tools = this.figureViews.flatMap((/** @type {any} */ view) => [...view.tool_views.values()]);
    for (const { ttmodels } of tools) for (const tip of ttmodels?.values() ?? []) tip.css_classes = ["nbdist-tip"];
    for (const model of this.document.all_models) {
      if (model.type === "ColumnDataSource" && model.name) this.sources[model.name] = model;
    }
  }

  get isReady() {
    return this.document !== null;
  }

  /** @param {string} source @param {Record<string, ArrayLike<unknown>>} columns */
  set(source, columns) {
    this.sources[source].data = columns;
  }

  /**
   * Rows from the top, each with a name; where rows are low, not all names are written.
   * @param {string[]} names @param {number} each height in pixels @param {number} [head] pixels free above
   */
  lanes(names, each, head = 0) {
    const text = JSON.stringify([names, each]);
    if (text !== this.laned) {
      this.laned = text;
      this.figure.y_range.setv({ start: Math.max(1, names.length), end: -head / each });
      const axis = this.figure.left[0];
      const stride = Math.ceil(NAME_PX / each);
      const ticks = names.map((_, i) => i + 0.5).filter((_, i) => i % stride === 0);
      axis.major_label_overrides = new Map(ticks.map((tick) => [tick, names[Math.floor(tick)]]));
      axis.ticker.ticks = ticks;
    }
    const height = Math.round(60 + names.length * each + head);
    if (this.figure.height !== height) this.figure.height = height;
  }

  /** @param {number} start @param {number} end */
  range(start, end) {
    this.figure.x_range.setv({ start, end });
  }

  /** All that there is, after a zoom. */
  whole() {
    this.laned = "";
    for (const view of this.figureViews) view.reset();
  }

  /** @returns {any[]} */
  get figureViews() {
    return [...(this.views?.query((/** @type {any} */ view) => view.model.type === "Figure") ?? [])];
  }

  repaint() {
    for (const view of this.figureViews) view.request_paint();
  }

  /** @returns {HTMLCanvasElement | null} */
  picture() {
    const [view] = this.figureViews;
    return view?.export("png", true).canvas ?? null;
  }

  /** Else `Bokeh.documents` keeps it for ever. */
  dispose() {
    if (!this.document) return;
    const documents = this.code.Bokeh.documents;
    const place = documents.indexOf(this.document);
    this.document.clear();
    if (place >= 0) documents.splice(place, 1);
    this.document = null;
    this.views = null;
  }
}
