// Frames and packed bytes, as Python sends them. No drawing.

const SCHEMA = 1;

/**
 * A frame, as `nbdist.protocol.frames` packs it.
 * @param {DataView} view @returns {import("./types").Frame}
 */
export function unpackedFrame(view) {
  // A buffer may begin anywhere in its message; arrays of numbers must not.
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength).slice().buffer;
  const start = 4 + new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, start - 4)));
  if (header.schema !== SCHEMA) throw new Error(`a frame of schema ${header.schema}`);
  /** @type {import("./types").Frame["tables"]} */
  const tables = {};
  for (const [name, type, offset, num] of header.columns) {
    const [table, column] = name.split(".");
    const kind = type === "f8" ? Float64Array : Float32Array;
    (tables[table] ??= {})[column] = new kind(bytes, start + offset, num);
  }
  return { header, tables };
}

/** What base64 says; a loop, since going through letters one by one takes 40 times as long. @param {string} text */
export function decoded(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** The bytes that gzip packed; a blob would go to another process and back. @param {ArrayBufferView} bytes @returns {Response} */
function streamed({ buffer, byteOffset, byteLength }) {
  const packed = new ReadableStream({
    start(controller) {
      controller.enqueue(new Uint8Array(buffer, byteOffset, byteLength));
      controller.close();
    },
  });
  return new Response(packed.pipeThrough(new DecompressionStream("gzip")));
}

/** @param {ArrayBufferView} bytes packed by gzip @returns {Promise<string>} */
export function unpacked(bytes) {
  return streamed(bytes).text();
}

/** @param {ArrayBufferView} bytes packed by gzip @returns {Promise<ArrayBuffer>} */
export function unpackedBytes(bytes) {
  return streamed(bytes).arrayBuffer();
}
