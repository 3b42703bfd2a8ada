// One stream for the page: numbers change where they stand, and nothing moves under the cursor.
import { speak } from "./dialogs.js";
import { clock, hover } from "./times.js";

const root = document.documentElement.dataset.root ?? "";
const numbers = new Map();
let source = null;
let paused = false;
let lostAt = null;
let signedOut = false;
let last = null;
let wait = 1000;
let spokenAt = 0;
let timer = 0;
let heard = 0;
let ahead = -Infinity; // how far the clock of the server is before that of this machine
const late = new Set(); // what was not exchanged, because somebody was at it, or nobody looks
const SILENCE = 10000; // the heart beats every two seconds: whoever hears nothing for so long is not connected

const now = () => Date.now() + (Number.isFinite(ahead) ? ahead : 0);

function pill(state, text) {
  const found = document.getElementById("pill");
  if (!found) return;
  found.dataset.state = state;
  found.textContent = text;
  found.title = last ? `Numbers as of ${hover(last)}\nPress p to pause` : "";
}

function show(state = "live") {
  if (paused) pill("paused", `paused, as of ${last ? clock(last) : "–"}`);
  else if (signedOut) pill("lost", "signed out: load the page again");
  else if (lostAt) pill("lost", `${state === "away" ? "database away" : "disconnected"} since ${clock(lostAt)}${last ? `, data as of ${clock(last)}` : ""}`);
  else pill("live", `live, ${last ? clock(last) : ""}`);
}

function lost(state) {
  if (!lostAt) { lostAt = new Date(); speak("Live updates are disconnected"); }
  show(state);
}

function written(value) {
  return typeof value === "number" ? value.toLocaleString("en") : value ?? "–";
}

function apply(elements = document.querySelectorAll("[data-live]")) {
  for (const each of elements) {
    const value = numbers.get(each.dataset.live);
    if (value === undefined || value === null) continue;
    const text = written(value);
    if (each.textContent === text) continue;
    each.textContent = each.classList.contains("count") && value === 0 ? "" : text;
    each.classList.remove("changed");
    void each.offsetWidth;
    each.classList.add("changed");
  }
}

// The same words as the server has for how long ago something was.
function ago(moment) {
  const away = (moment - now()) / 1000;
  const seconds = Math.abs(away);
  if (seconds < 1) return "now";
  const rounded = [[10, 1, "s", 1], [120, 1, "s", 0], [7200, 60, "min", 0], [172800, 3600, "h", 0], [Infinity, 86400, "days", 0]];
  const [, unit, name, digits] = rounded.find(([limit]) => seconds < limit);
  const length = `${(seconds / unit).toFixed(digits)} ${name}`;
  return away > 0 ? `in ${length}` : `${length} ago`;
}

function tick() {
  if (paused) return;
  for (const each of document.querySelectorAll("[data-live-time]")) {
    const value = numbers.get(each.dataset.liveTime);
    const time = each.querySelector("time");
    if (value && time) time.dateTime = value;
  }
  for (const each of document.querySelectorAll("main time")) {
    if (/ ago$|^in |^now$/.test(each.textContent)) each.textContent = ago(new Date(each.dateTime));
  }
  for (const each of document.querySelectorAll("[data-live-time] time")) {
    each.title = hover(new Date(each.dateTime));
  }
}

// On a phone the menu is wider than the screen: the page that is shown is in its middle.
function centre() {
  const current = document.querySelector(".nav [aria-current]");
  const menu = current?.closest("nav");
  if (!menu) return;
  const [inner, outer] = [current.getBoundingClientRect(), menu.getBoundingClientRect()];
  menu.scrollLeft += inner.left - outer.left - (outer.width - inner.width) / 2;
}

// Who else has this group, letter or plan open: two people who do the same do it twice.
function present() {
  const found = document.getElementById("present");
  const names = numbers.get("here") ?? "";
  if (!found || found.dataset.names === names) return;
  found.dataset.names = names;
  found.hidden = !names;
  found.textContent = names && `${names} ${names.includes(", ") ? "are" : "is"} here, too`;
}

// Where a group goes, in the words of the server: `before` is the most of an hour that is over.
function trends() {
  for (const each of document.querySelectorAll("[data-trend]")) {
    const [hour, died] = ["hour", "last"].map((name) => numbers.get(`${each.dataset.trend}.${name}`));
    const before = Number(each.dataset.before);
    if (hour === undefined || !died) continue;
    const fresh = now() - new Date(died) < 600000;
    const word = hour === 0 ? "quiet" : fresh && hour > 2 * Math.max(before, 1) ? "growing" : fresh && before <= 2 * hour ? "steady" : "calming";
    if (each.textContent !== word) each.textContent = word;
  }
}

const tell = (name, element = document.body) => element.dispatchEvent(new CustomEvent(name));

function beat(event) {
  const said = JSON.parse(event.data);
  const known = last;
  heard = Date.now();
  last = new Date(said.at);
  ahead = Math.max(ahead, last - heard);
  if (lostAt && known && last <= known) return; // who comes back hears first what was known before
  if (lostAt) speak("Live updates are back");
  lostAt = null;
  signedOut = false;
  wait = 1000;
  const first = numbers.size === 0;
  const before = { deaths: numbers.get("letters.ever"), newest: numbers.get("groups.newest") };
  for (const [name, value] of Object.entries(said.numbers)) {
    if (numbers.get(name) === value) delete said.numbers[name]; // a stream that begins again tells them all
    else numbers.set(name, value);
  }
  present();
  if (paused) return;
  show();
  apply();
  trends();
  tick();
  if (first) { centre(); return; }
  const changed = Object.keys(said.numbers).filter((each) => each !== "here" && !each.endsWith(".age"));
  if (changed.length) tell("bartleby-changed");
  if (changed.some((each) => /^queue\..*\.state$/.test(each))) tell("bartleby-standing");
  if (before.deaths !== numbers.get("letters.ever")) {
    tell("bartleby-deaths");
    if (Date.now() - spokenAt > 10000) {
      spokenAt = Date.now();
      const more = numbers.get("letters.ever") - before.deaths;
      if (more > 0) speak(`${more} more dead letter${more === 1 ? "" : "s"}`);
    }
  }
  if (before.newest !== numbers.get("groups.newest")) tell("bartleby-groups");
  document.dispatchEvent(new CustomEvent("bartleby-pulse", { detail: { at: last, numbers } }));
}

function connect() {
  source?.close();
  heard = Date.now();
  const place = location.pathname.slice(root.length);
  source = new EventSource(`${root}/live${/^\/(groups|letters|operations)\/\d+$/.test(place) ? `?place=${encodeURIComponent(place)}` : ""}`);
  source.addEventListener("pulse", beat);
  source.addEventListener("again", connect);
  source.addEventListener("away", () => { heard = Date.now(); lost("away"); });
  source.onerror = () => {
    lost("stream");
    if (source.readyState === EventSource.CLOSED) {
      clearTimeout(timer);
      notKnown();
      timer = setTimeout(connect, wait);
      wait = Math.min(15000, wait * 2);
    }
  };
}

// A machine that has slept, or a network that swallows, has a stream that is open and says nothing.
function watch() {
  tick();
  for (const each of [...late]) { late.delete(each); if (each.isConnected) tell("bartleby-late", each); }
  if (!source || Date.now() - heard < SILENCE) return;
  lost("stream");
  connect();
}

// Whose session is over is told to sign in again, and is not sent away from what they read.
async function notKnown() {
  try {
    const answer = await fetch(`${root}/live/history?queue=`, { redirect: "manual", cache: "no-store" });
    signedOut = lostAt !== null && (answer.type === "opaqueredirect" || answer.status === 401);
    if (signedOut) show();
  } catch { /* the pill says that it is disconnected */ }
}

export function togglePause() {
  paused = !paused;
  show();
  if (!paused) { apply(); tell("bartleby-standing"); }
  speak(paused ? "Live updates are paused" : "Live updates go on");
}

export function start() {
  centre();
  if (document.documentElement.dataset.known === undefined || !("EventSource" in window)) return;
  document.getElementById("pill").addEventListener("click", togglePause);
  document.addEventListener("bartleby-times", () => show());
  document.addEventListener("bartleby-place", () => { numbers.delete("here"); present(); if (source) connect(); });
  document.addEventListener("htmx:after:swap", () => apply());
  // a page that nobody looks at needs no stream, and browsers have only six to a host
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { source?.close(); source = null; clearTimeout(timer); } else if (!source) connect();
  });
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  // while somebody works with a region, it is not exchanged under their hands
  document.addEventListener("htmx:before:request", (event) => {
    const element = event.target;
    if (!element.matches?.('[hx-trigger^="every"], [hx-trigger^="bartleby-"], [hx-trigger$="bartleby-late"]')) return;
    const target = element.getAttribute("hx-target");
    const region = (target && document.querySelector(target)) || element;
    const typing = document.activeElement?.matches("input:not([type=checkbox]), textarea, select") && region.contains(document.activeElement);
    // neither rows of a list nor buttons change under the cursor; a finger leaves :hover behind on what it has tapped
    const used = matchMedia("(hover: hover)").matches ? ":is(:hover, :focus-within)" : ":focus-within";
    const busy = element.matches("[data-forms]") ? element.matches(used)
      : element.matches('[hx-trigger^="every"]:not([hx-target])') && region.querySelector(`[data-row]${used}, td details[open] form`);
    if (!paused && !signedOut && !typing && !busy && !document.hidden) return;
    if (element.matches('[hx-trigger$="bartleby-late"]')) late.add(element);
    event.preventDefault();
  });
  // a part of the page is not given to whoever is signed out, and then the stream is not either
  document.addEventListener("htmx:response:error", (event) => {
    if (event.detail.ctx.response.status === 401 && !signedOut) connect();
  });
  setInterval(watch, 5000);
  connect();
}
