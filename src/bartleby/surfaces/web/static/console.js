// What makes pages quicker to use; without it they work all the same.
import { start as startKeys } from "./keys.js";
import { start as startLive } from "./live.js";
import { start as startPalette } from "./palette.js";
import { start as startCompleting } from "./complete.js";
import { start as startViews } from "./views.js";
import { switchTimes, write as writeTimes } from "./times.js";
import { showDialog, speak } from "./dialogs.js";

function ready(root) {
  for (const each of root.querySelectorAll("[data-copy][hidden], [data-help][hidden], [data-theme-switch][hidden]")) {
    each.hidden = false;
  }
  count();
  startCompleting();
  writeTimes();
}

async function copy(button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    const range = document.createRange();
    const code = button.parentElement.querySelector("code, pre") ?? button;
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = "Selected";
  }
  speak(button.textContent);
  setTimeout(() => { button.textContent = label; }, 1500);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("bartleby-theme", root.dataset.theme); } catch { /* only for this page then */ }
  document.dispatchEvent(new CustomEvent("bartleby-theme"));
}

function count() {
  const form = document.getElementById("chosen");
  if (!form) return;
  const boxes = [...form.querySelectorAll('input[name="ids"]')];
  const ticked = boxes.filter((each) => each.checked).length;
  const every = form.elements.namedItem("matching");
  const matching = form.querySelector("[data-matching]");
  const whole = ticked > 0 && ticked === boxes.length;
  if (every && !whole) every.value = "";
  const all = every?.value === "true";
  const many = all ? matching.dataset.matching : ticked.toLocaleString("en");
  if (matching) {
    matching.hidden = !whole;
    matching.textContent = all ? `Only the ${ticked.toLocaleString("en")} of this page` : `Select all ${matching.dataset.matching} that fit`;
  }
  const words = form.querySelector("[data-selected]");
  if (words) {
    words.dataset.nothing ??= words.textContent;
    words.textContent = all ? `All ${many} that fit are selected` : ticked ? `${many} selected` : words.dataset.nothing;
  }
  for (const button of form.querySelectorAll("[data-count]")) {
    button.dataset.nothing ??= button.textContent;
    button.disabled = form.dataset.ticks !== undefined && !ticked;
    button.textContent = ticked ? button.dataset.count.replace("#", many) : button.dataset.nothing;
  }
  const box = form.querySelector("[data-all]");
  if (box) {
    box.checked = whole;
    box.indeterminate = ticked > 0 && !whole;
  }
}

// Ticks the whole page, and means what does not fit on it as well, or not any more.
function selectMatching() {
  const form = document.getElementById("chosen");
  if (!form) return;
  const every = form.elements.namedItem("matching");
  for (const each of form.querySelectorAll('input[name="ids"]')) each.checked = true;
  if (every) every.value = every.value ? "" : "true";
  count();
  speak(form.querySelector("[data-selected]")?.textContent ?? "");
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy], [data-theme-switch], [data-times-switch], [data-matching], [data-help]");
  if (!button) return;
  if (button.dataset.copy !== undefined) copy(button);
  else if (button.dataset.themeSwitch !== undefined) switchTheme();
  else if (button.dataset.timesSwitch !== undefined) switchTimes();
  else if (button.dataset.matching !== undefined) selectMatching();
  else showDialog("help-parts");
});
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-all]")) {
    for (const each of event.target.form.querySelectorAll('input[name="ids"]')) each.checked = event.target.checked;
  }
  if (event.target.matches('[data-all], input[name="ids"]')) count();
});
// A form is sent once, however often it is clicked; htmx sends it also where only its default was prevented.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (Date.now() - Number(form.dataset.sent ?? 0) < 10000) {
    event.preventDefault();
    event.stopImmediatePropagation();
  } else {
    form.dataset.sent = Date.now();
  }
}, true);
document.addEventListener("htmx:finally:request", (event) => { if (event.target.dataset) delete event.target.dataset.sent; });

// What a deed leads to has an address of its own: reloading, going back and copying the link give what is shown.
const address = (place) => place.pathname + place.search;
let shown = address(location);
function follow(answer) {
  const there = answer?.redirected && answer.ok ? new URL(answer.url) : null;
  if (!there || there.origin !== location.origin || address(there) === shown) return;
  history.pushState(null, "", there);
  shown = address(there);
  document.dispatchEvent(new CustomEvent("bartleby-place"));
  const links = [...document.querySelectorAll("[data-go]")];
  const fits = (link) => there.pathname === link.pathname || there.pathname.startsWith(`${link.pathname.replace(/\/$/, "")}/`);
  const current = links.filter(fits).sort((one, other) => other.pathname.length - one.pathname.length)[0];
  for (const each of links) {
    if (each === current) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
}
addEventListener("popstate", () => { if (address(location) !== shown) location.reload(); });

document.addEventListener("htmx:after:swap", (event) => {
  ready(document);
  if (event.detail?.ctx?.request?.method === "POST") follow(event.detail.ctx.response?.raw);
  const done = event.detail?.ctx?.request?.method === "POST" && document.querySelector("#notices .notice");
  if (done) { done.tabIndex = -1; done.focus({ preventScroll: true }); done.scrollIntoView({ block: "nearest" }); }
});

// A deed that could not be told is not silently lost: whether it was done is said, or that nobody knows.
function tell(text, hint) {
  const notice = document.createElement("div");
  notice.className = "notice bad";
  notice.setAttribute("role", "alert");
  const words = document.createElement("p");
  const more = document.createElement("span");
  words.textContent = text;
  more.className = "hint";
  more.textContent = hint;
  words.append(more);
  notice.append(words);
  document.getElementById("notices")?.replaceChildren(notice);
}
document.addEventListener("htmx:response:error", (event) => {
  const { request, response } = event.detail.ctx;
  if (request?.method !== "POST") return;
  if (response.status === 429) tell("Nothing was done: too many changes in a minute.", "Wait a moment, then do it again.");
  else if (response.status >= 500) {
    const away = response.status === 503 ? "The database cannot be reached" : "Something went wrong here";
    const id = response.raw?.headers.get("X-Request-Id");
    tell(`${away}, and whether it was done is not known.`, `Look before you do it again.${id ? ` Request ${id}` : ""}`);
  }
});
document.addEventListener("htmx:error", (event) => {
  if (event.detail.ctx?.request?.method !== "POST") return;
  tell("The console cannot be reached, and whether it was done is not known.", "Load the page again and look before you do it again.");
});
addEventListener("pageshow", () => {
  for (const each of document.forms) delete each.dataset.sent;
  count(); // who comes back finds what was ticked
});

ready(document);
// who has to say yes finds no on the key, and on a phone still sees what is asked
document.querySelector("[data-back=there]")?.focus({ preventScroll: true });
startKeys({ switchTheme, switchTimes, selectMatching });
startPalette();
startViews();
startLive();
