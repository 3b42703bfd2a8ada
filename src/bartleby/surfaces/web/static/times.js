// Moments in UTC, which everybody has, or as the clock on the wall says; whatever is shown, the other is on hover.
const two = (number) => String(number).padStart(2, "0");

function local() {
  try { return localStorage.getItem("bartleby-times") === "local"; } catch { return false; }
}

function parts(moment, here) {
  const get = (name) => (here ? moment[`get${name}`]() : moment[`getUTC${name}`]());
  const date = `${get("FullYear")}-${two(get("Month") + 1)}-${two(get("Date"))}`;
  return { date, clock: `${two(get("Hours"))}:${two(get("Minutes"))}:${two(get("Seconds"))}`, hour: `${two(get("Hours"))}:${two(get("Minutes"))}` };
}

function zone(moment) {
  const away = -moment.getTimezoneOffset();
  return `UTC${away < 0 ? "-" : "+"}${two(Math.floor(Math.abs(away) / 60))}:${two(Math.abs(away) % 60)}`;
}

export function clock(moment) {
  return parts(moment, local()).clock;
}

function whole(moment, here = local()) {
  const { date, clock: time } = parts(moment, here);
  return `${date} ${time} ${here ? zone(moment) : "UTC"}`;
}

export function hover(moment) {
  return `${whole(moment, false)}\n${whole(moment, true)}, here`;
}

// How long ago stays how long ago; only what is a moment is written anew.
export function write(region = document) {
  for (const each of region.querySelectorAll("time[datetime]")) {
    const moment = new Date(each.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    const text = { whole: () => whole(moment), clock: () => clock(moment), hour: () => parts(moment, local()).hour, day: () => parts(moment, local()).date }[each.dataset.as];
    if (text && each.textContent !== text()) each.textContent = text();
    if (each.dataset.as === "day") each.hidden = each.closest("li").previousElementSibling?.querySelector('[data-as="day"]')?.textContent === each.textContent;
    if (each.title !== hover(moment)) each.title = hover(moment);
  }
  for (const each of region.querySelectorAll("[data-hour]")) {
    const moment = new Date(each.dataset.hour);
    const said = `${parts(moment, local()).hour} ${local() ? zone(moment) : "UTC"}: ${each.dataset.died}`;
    each.setAttribute("aria-label", said);
    each.querySelector("title").textContent = said;
  }
  for (const each of document.querySelectorAll("[data-times-switch]")) {
    each.textContent = local() ? "local" : "UTC";
    each.hidden = false;
  }
}

export function switchTimes() {
  try { localStorage.setItem("bartleby-times", local() ? "utc" : "local"); } catch { /* then it is UTC */ }
  write();
  document.dispatchEvent(new CustomEvent("bartleby-times"));
}
