/** The digits that a page carries, as digits.py packs them. */

const PIXELS = 784; // of an image
const SHADES = 15; // the largest gray level
const MULTIPLE = 4; // of so many pixels, because training.js takes as many together

/**
 * @typedef {Object} Digits Images, of which only pixels that are not black are kept.
 * @property {Uint8Array} classes The class of each.
 * @property {Uint32Array} begins Where the pixels of each image begin, and where those of the last one end.
 * @property {Uint16Array} pixels Places in an image.
 * @property {Float32Array} levels From 0 to 1; 0 where a pixel only fills up an image.
 */

/** @returns {ArrayBuffer} What Python has written in base64. */
export function bytes(/** @type {string} */ base64) {
  const letters = atob(base64);
  const found = new Uint8Array(letters.length);
  for (let i = 0; i < found.length; i++) found[i] = letters.charCodeAt(i);
  return found.buffer;
}

/** @returns {Promise<Digits>} The digits of a page, which Python has packed and written in base64. */
export async function digitsOf(/** @type {string} */ base64) {
  return unpacked(await inflated(bytes(base64)));
}

/** Undo zlib.compress. */
export async function inflated(/** @type {BufferSource} */ content) {
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @returns {Digits} Images from the class of each, a byte each, and after them the gray levels, two in a byte. */
export function unpacked(/** @type {Uint8Array} */ packed) {
  const count = packed.length / (1 + PIXELS / 2);
  const begins = new Uint32Array(count + 1);
  const pixels = new Uint16Array(count * PIXELS);
  const levels = new Float32Array(count * PIXELS);
  let kept = 0;
  for (let image = 0; image < count; image++) {
    for (let pixel = 0; pixel < PIXELS; pixel++) {
      const pair = packed[count + (image * PIXELS + pixel >> 1)];
      const shade = pixel % 2 ? pair & 15 : pair >> 4;
      if (!shade) continue;
      pixels[kept] = pixel;
      levels[kept++] = shade / SHADES;
    }
    kept = MULTIPLE * Math.ceil(kept / MULTIPLE);
    begins[image + 1] = kept;
  }
  return { classes: packed.slice(0, count), begins, pixels: pixels.slice(0, kept), levels: levels.slice(0, kept) };
}
