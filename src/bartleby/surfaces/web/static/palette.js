// The palette: go anywhere, find anything.
import { showDialog } from "./dialogs.js";
import { address, kept } from "./views.js";

const root = document.documentElement.dataset.root ?? "";

function choices(text) {
  const pages = [...document.querySelectorAll("[data-go]")].map((each) => ({ name: each.firstChild.textContent.trim(), href: each.href, where: "page" }));
  const rows = [...document.querySelectorAll("[data-row] a")].slice(0, 200).map((each) => ({ name: each.textContent.trim(), href: each.href, where: "on this page" }));
  const deeds = [...document.querySelectorAll("details.deed > summary")].map((each) => ({ name: each.textContent.trim(), element: each, where: "form" }));
  const views = kept().map((each) => ({ name: each.name, href: address(each), where: "your view" }));
  const typed = text.trim();
  const found = [...pages, ...views, ...deeds, ...rows].filter((each) => !typed || each.name.toLowerCase().includes(typed.toLowerCase()));
  const direct = [];
  if (/^\d+$/.test(typed)) {
    direct.push({ name: `Letter ${typed}`, href: `${root}/letters/${typed}`, where: "letter" });
    direct.push({ name: `Group ${typed}`, href: `${root}/groups/${typed}`, where: "group" });
    direct.push({ name: `Replay ${typed}`, href: `${root}/operations/${typed}`, where: "operation" });
  }
  if (typed && !/^\d+$/.test(typed)) {
    const find = { name: `Find letters: ${typed}`, href: `${root}/letters?filter=${encodeURIComponent(typed)}`, where: "filter" };
    if (typed.includes(":")) direct.unshift(find); else found.push(find);
  }
  return [...direct, ...found].slice(0, 12);
}

export function openPalette() {
  const dialog = showDialog("palette-parts");
  const input = dialog.querySelector("input");
  const list = dialog.querySelector("ul");
  let found = [];
  let chosen = 0;

  function show() {
    list.replaceChildren(...found.map((each, place) => {
      const row = document.createElement("li");
      row.id = `choice-${place}`;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(place === chosen));
      const name = document.createElement("span");
      name.textContent = each.name;
      const where = document.createElement("span");
      where.className = "where";
      where.textContent = each.where;
      row.append(name, where);
      row.addEventListener("click", () => go(each));
      return row;
    }));
    if (found.length) input.setAttribute("aria-activedescendant", `choice-${chosen}`);
    else input.removeAttribute("aria-activedescendant");
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
  }
  function go(each) {
    dialog.close();
    if (each.element) {
      each.element.parentElement.open = true;
      (each.element.parentElement.querySelector("textarea, input:not([type=hidden])") ?? each.element).focus();
    } else {
      location.assign(each.href);
    }
  }
  input.oninput = () => { found = choices(input.value); chosen = 0; show(); };
  input.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) { event.preventDefault(); chosen = (chosen + step + found.length) % found.length; show(); }
    if (event.key === "Enter" && found[chosen]) { event.preventDefault(); go(found[chosen]); }
  };
  input.value = "";
  input.oninput();
  input.focus();
}

export function start() {
  addEventListener("pagehide", () => { for (const each of document.querySelectorAll("dialog[open]")) each.close(); });
}
