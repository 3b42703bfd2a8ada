// What a filter can say, offered while one is typed: arrows choose, Enter or Tab takes, Escape leaves it be.
const root = document.documentElement.dataset.root ?? "";
const MOST = 10;
let known = null;

async function learn(filter) {
  try {
    const answer = await fetch(`${root}/letters/words?filter=${encodeURIComponent(filter)}`, { cache: "no-store" });
    if (answer.ok) known = await answer.json();
  } catch { /* typing goes on without help */ }
}

// The word at the cursor: where it begins, the sign before it, its field, and what of its value is there.
function wordAt(input) {
  const before = input.value.slice(0, input.selectionStart);
  if ((before.match(/"/g) ?? []).length % 2) return null;
  const word = /\S*$/.exec(before)[0];
  const [, sign, name, colon, value] = /^(-?)([^:]*)(:?)(.*)$/.exec(word);
  const last = value.lastIndexOf(",") + 1;
  return { at: before.length - word.length + sign.length, name, colon, value, from: before.length - value.length + last, typed: value.slice(last) };
}

function offers(word) {
  const fits = (text, typed) => text.toLowerCase().includes(typed.toLowerCase()) && text !== typed;
  const first = (typed) => (one, other) => Number(other.text.startsWith(typed)) - Number(one.text.startsWith(typed));
  if (!word.colon) {
    const fields = known.fields.filter((each) => !["payload", "headers"].includes(each.name)).map((each) => ({ text: `${each.name}:`, means: each.means }));
    const paths = known.paths.map((each) => ({ text: `${each}:`, means: "a value of these letters" }));
    return [...fields, ...paths].filter((each) => fits(each.text, word.name)).sort(first(word.name)).map((each) => ({ ...each, from: word.at })).slice(0, MOST);
  }
  const field = known.fields.find((each) => each.name === word.name);
  const values = { queue: known.queues, type: known.types, version: known.versions }[word.name] ?? field?.choices ?? [];
  return values.filter((each) => fits(each, word.typed)).map((text) => ({ text, means: "", from: word.from })).sort(first(word.typed)).slice(0, MOST);
}

function attach(input) {
  if (input.dataset.complete === "on") return;
  input.dataset.complete = "on";
  const list = document.createElement("ul");
  list.id = `${input.id}-choices`;
  list.className = "choices";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "What a filter can say");
  list.hidden = true;
  input.after(list);
  for (const [name, value] of Object.entries({ role: "combobox", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": list.id })) {
    input.setAttribute(name, value);
  }
  let found = [];
  let chosen = -1;

  function show() {
    list.replaceChildren(...found.map((each, place) => {
      const row = document.createElement("li");
      row.id = `${list.id}-${place}`;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(place === chosen));
      const text = document.createElement("code");
      text.textContent = each.text;
      const means = document.createElement("span");
      means.className = "where";
      means.textContent = each.means;
      row.append(text, means);
      row.addEventListener("pointerdown", (event) => { event.preventDefault(); take(each); });
      return row;
    }));
    list.hidden = !found.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    if (chosen >= 0) input.setAttribute("aria-activedescendant", `${list.id}-${chosen}`);
    else input.removeAttribute("aria-activedescendant");
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
  }
  function close() { found = []; chosen = -1; show(); }
  function look() {
    const word = known && wordAt(input);
    found = word ? offers(word) : [];
    chosen = -1;
    show();
  }
  function take(each) {
    const end = each.text.endsWith(":") ? "" : " ";
    input.setRangeText(each.text + end, each.from, input.selectionStart, "end");
    look();
  }
  input.addEventListener("input", look);
  input.addEventListener("focus", () => { if (!known) learn(input.value).then(() => { if (document.activeElement === input && input.value) look(); }); });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      if (!found.length) { look(); if (!found.length) return; }
      event.preventDefault();
      chosen = (chosen + step + (chosen < 0 && step < 0 ? 1 : 0) + found.length) % found.length;
      show();
    } else if ((event.key === "Enter" || event.key === "Tab") && chosen >= 0) {
      event.preventDefault();
      take(found[chosen]);
    } else if (event.key === "Escape" && found.length) {
      event.preventDefault();
      event.stopPropagation();
      close();
    }
  });
  // on the page of letters it has the cursor before this has run
  if (document.activeElement === input) learn(input.value);
}

export function start() {
  for (const each of document.querySelectorAll("input[data-complete]")) attach(each);
}
