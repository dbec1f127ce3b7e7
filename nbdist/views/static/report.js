// A report's page: draws the run that the page itself holds. Asks nobody for anything.

import { pictured, show } from "./dashboard.js";
import { element } from "./format.js";
import { decoded, unpackedBytes, unpackedFrame } from "./frame.js";

const SAVED_FOR_MS = 10_000;

/** What an element of the page holds, packed. @param {string} id @returns {Promise<ArrayBuffer | null>} */
async function held(id) {
  const text = document.getElementById(id)?.textContent?.trim();
  if (!text) return null;
  return unpackedBytes(decoded(text));
}

/** @param {string} id @returns {any} */
function told(id) {
  return JSON.parse(document.getElementById(id)?.textContent ?? "null");
}

/** In the place of the picture, the views. @param {any} Bokeh */
export async function open(Bokeh) {
  const frame = await held("nbdist-frame");
  const place = document.getElementById("nbdist-views");
  if (!frame || !place) return;
  Bokeh.set_log_level("error"); // it warns of charts without data, which have some a moment later
  const box = element("div", "nbdist");
  const pictures = [...place.children];
  place.append(box);
  const host = { settings: told("nbdist-settings"), order: () => {} };
  const code = { Bokeh, figures: told("nbdist-figures"), views: { pictured, show } };
  const shown = await show(box, code, host);
  const reference = await held("nbdist-reference");
  if (reference) {
    const { header, tables } = unpackedFrame(new DataView(reference));
    shown.compare(header.run?.run ?? "", tables);
  }
  shown.take(unpackedFrame(new DataView(frame)));
  for (const picture of pictures) picture.remove();
  offerRecord();
  // Charts look up their colours again when the body's class changes.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => {
    document.body.classList.toggle("nbdist-dark", matches);
  });
}

/** Without this the link saves the record as it is held: packed. */
function offerRecord() {
  const link = /** @type {HTMLAnchorElement | null} */ (document.getElementById("nbdist-record"));
  link?.addEventListener("click", async (event) => {
    const packed = link.href.split(",")[1];
    if (!packed || !link.download.endsWith(".gz")) return;
    event.preventDefault();
    const bytes = await unpackedBytes(decoded(packed));
    const saved = element("a");
    saved.href = URL.createObjectURL(new Blob([bytes], { type: "application/jsonl" }));
    saved.download = link.download.slice(0, -".gz".length);
    saved.click();
    setTimeout(() => URL.revokeObjectURL(saved.href), SAVED_FOR_MS);
  });
}
