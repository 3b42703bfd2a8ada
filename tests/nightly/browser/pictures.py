"""Pictures that weigh little: each has a palette of colours that can be told apart. The browser makes it: it can."""

import base64
import struct
import zlib
from pathlib import Path

from playwright.sync_api import Browser

# The most frequent first; what is hardly another colour becomes the nearest of those that are kept.
_INDEX = """async (png) => {
  const image = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const pixels = new Uint32Array(canvas.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const each of pixels) counts.set(each, (counts.get(each) ?? 0) + 1);
  const kept = [];
  const places = new Map();
  for (const each of [...counts.keys()].sort((one, other) => counts.get(other) - counts.get(one))) {
    const [r, g, b] = [each & 255, (each >> 8) & 255, (each >> 16) & 255];
    const far = kept.map((colour) => (colour[0] - r) ** 2 + (colour[1] - g) ** 2 + (colour[2] - b) ** 2);
    const nearest = far.indexOf(Math.min(...far));
    const another = kept.length < 256 && !(far[nearest] < 100);
    places.set(each, another ? kept.push([r, g, b]) - 1 : nearest);
  }
  const lines = new Uint8Array((image.width + 1) * image.height);
  for (let y = 0; y < image.height; y++) {
    for (let x = 0; x < image.width; x++) {
      lines[y * (image.width + 1) + x + 1] = places.get(pixels[y * image.width + x]);
    }
  }
  return { width: image.width, height: image.height, kept: kept.flat(), lines: lines.toBase64() };
}"""


def shrink(browser: Browser, files: list[Path]) -> None:
    """Write each again with a palette."""
    page = browser.new_page()
    for file in files:
        found = page.evaluate(_INDEX, base64.b64encode(file.read_bytes()).decode())
        head = struct.pack(">IIBBBBB", found["width"], found["height"], 8, 3, 0, 0, 0)
        body = zlib.compress(base64.b64decode(found["lines"]), 9)
        parts = ((b"IHDR", head), (b"PLTE", bytes(found["kept"])), (b"IDAT", body), (b"IEND", b""))
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts))
    page.close()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
