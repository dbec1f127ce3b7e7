// The code of one version, kept by the tab while it is open: loaded again, it need not be sent it again.

import { decoded } from "./frame.js";

const NAME = "nbdist-code";
const CHUNK_BYTES = 8192;

/**
 * A page may be forbidden to store anything, or have no room: then it is sent everything each time.
 * @template T @param {(tab: Storage) => T} act @returns {T | null}
 */
function stored(act) {
  try {
    return act(sessionStorage);
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}

/** @param {DataView} bytes */
function asText({ buffer, byteOffset, byteLength }) {
  let text = "";
  for (let i = 0; i < byteLength; i += CHUNK_BYTES) {
    const length = Math.min(CHUNK_BYTES, byteLength - i);
    text += String.fromCharCode(...new Uint8Array(buffer, byteOffset + i, length));
  }
  return btoa(text);
}

/** @param {string} version @param {DataView[]} buffers */
export function keep(version, buffers) {
  stored((tab) => tab.setItem(NAME, JSON.stringify({ version, texts: buffers.map(asText) })));
}

export function forget() {
  stored((tab) => tab.removeItem(NAME));
}

/** @param {string} version @returns {DataView[] | null} */
export function kept(version) {
  const text = stored((tab) => tab.getItem(NAME));
  const found = text ? JSON.parse(text) : {};
  return found.version === version ? found.texts.map((/** @type {string} */ one) => new DataView(decoded(one).buffer)) : null;
}
