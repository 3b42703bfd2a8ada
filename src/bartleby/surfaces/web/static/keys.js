// Single keys: they open forms and move, and never do anything that cannot be undone.
import { keysOn, showDialog } from "./dialogs.js";
import { togglePause } from "./live.js";
import { openPalette } from "./palette.js";

const root = document.documentElement.dataset.root ?? "";
let going = 0;
let star = 0;
let at = -1;
let anchor = -1;

const rows = () => [...document.querySelectorAll("[data-row]")].filter((each) => each.offsetParent !== null);

function move(step) {
  const all = rows();
  if (!all.length) return;
  all[at]?.classList.remove("at");
  at = Math.max(0, Math.min(all.length - 1, at + step));
  all[at].classList.add("at");
  all[at].querySelector("a")?.focus();
  all[at].scrollIntoView({ block: "nearest" });
}

function tick(range) {
  const all = rows();
  const box = all[at]?.querySelector('input[type="checkbox"]');
  if (!box) return;
  const from = range && anchor >= 0 ? Math.min(anchor, at) : at;
  const until = range && anchor >= 0 ? Math.max(anchor, at) : at;
  const wanted = range ? true : !box.checked;
  for (const row of all.slice(from, until + 1)) {
    const each = row.querySelector('input[type="checkbox"]');
    if (each) each.checked = wanted;
  }
  anchor = at;
  box.dispatchEvent(new Event("change", { bubbles: true }));
}

// Opens a form and puts the cursor into it; the button in it is pressed by whoever means it.
function open(key) {
  const found = [...document.querySelectorAll(`[data-key="${key}"]`)].find((each) => each.offsetParent !== null);
  if (!found) return false;
  if (found.matches("summary")) {
    found.parentElement.open = true;
    (found.parentElement.querySelector("textarea, input:not([type=hidden])") ?? found).focus();
  } else if (key === "z") {
    found.click();
  } else {
    found.focus();
  }
  return true;
}

// From one thing back to where somebody came from, with its filter and place; from elsewhere, to the list above it.
function back() {
  const above = document.querySelector("[data-back]");
  if (!above) return;
  if (document.referrer.startsWith(location.origin + root) && history.length > 1 && !above.matches("[data-back=there]")) history.back();
  else location.assign(above.href);
}

const typing = (target) => target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]");

export function start({ switchTheme, switchTimes, selectMatching }) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      if ((event.ctrlKey || event.metaKey) && event.key === "k") { event.preventDefault(); openPalette(); }
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && typing(event.target)) { event.target.blur(); return; }
    if (typing(event.target) || !keysOn()) return;
    if (event.key === "Escape" && !event.defaultPrevented) { back(); return; }
    if (going && Date.now() - going < 1500) {
      going = 0;
      const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    if (star && Date.now() - star < 1500) {
      star = 0;
      if (event.key === "a") { event.preventDefault(); selectMatching(); }
      return;
    }
    const deeds = {
      "*": () => { star = Date.now(); }, u: switchTimes,
      "/": () => openPalette(), "?": () => showDialog("help-parts"), g: () => { going = Date.now(); },
      j: () => move(1), k: () => move(-1), o: () => rows()[at]?.querySelector("a")?.click(),
      x: () => tick(false), X: () => tick(true), p: () => togglePause(), t: switchTheme,
      r: () => open("r"), d: () => open("d"), e: () => open("e"), s: () => open("s"), n: () => open("n"), z: () => open("z"),
    };
    if (deeds[event.key]) { event.preventDefault(); deeds[event.key](); }
  });
  document.addEventListener("htmx:after:swap", () => { at = Math.min(at, rows().length - 1); });
}
