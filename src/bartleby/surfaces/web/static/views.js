// Views that somebody keeps: an address has the whole state of a list, so a view is a name for one. They stay in this browser.
const root = document.documentElement.dataset.root ?? "";
const MOST = 30;

export function kept() {
  try {
    const found = JSON.parse(localStorage.getItem("bartleby-views") ?? "[]");
    return found.filter((each) => typeof each.name === "string" && /^\/(letters|groups)\?/.test(each.place));
  } catch { return []; }
}

function keep(views) {
  try { localStorage.setItem("bartleby-views", JSON.stringify(views.slice(-MOST))); } catch { /* storage may be forbidden */ }
}

export const address = (view) => root + view.place;

export function start() {
  const box = document.querySelector("[data-views]");
  if (!box) return;
  const [list, name, button, fold] = ["[data-views-list]", "input", "details button", "details"].map((each) => box.querySelector(each));
  const page = location.pathname.slice(root.length);
  const place = page + location.search;

  function show() {
    const mine = kept().filter((each) => each.place.startsWith(`${page}?`));
    const label = document.createElement("span");
    label.className = "quiet";
    label.textContent = mine.length ? "Your views" : "";
    list.replaceChildren(label, ...mine.flatMap((each) => {
      const link = document.createElement("a");
      link.className = "chip";
      link.href = address(each);
      link.textContent = each.name;
      if (each.place === place) link.setAttribute("aria-current", "true");
      const drop = document.createElement("button");
      drop.type = "button";
      drop.className = "small plain";
      drop.textContent = "×";
      drop.setAttribute("aria-label", `Forget the view ${each.name}`);
      drop.addEventListener("click", () => { keep(kept().filter((other) => other.name !== each.name)); show(); });
      return [link, drop];
    }));
    box.hidden = !mine.length && !location.search;
    fold.hidden = !location.search || mine.some((each) => each.place === place);
  }
  const add = () => {
    const said = name.value.trim().slice(0, 40);
    if (!said) { name.focus(); return; }
    keep([...kept().filter((each) => each.name !== said), { name: said, place }]);
    name.value = "";
    fold.open = false;
    show();
  };
  button.addEventListener("click", add);
  name.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); add(); } });
  show();
}
