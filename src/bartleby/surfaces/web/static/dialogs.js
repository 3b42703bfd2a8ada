// Dialogs from templates of the page: focus goes in, and comes back to where it was.
export function speak(text) {
  const spoken = document.getElementById("spoken");
  if (spoken) spoken.textContent = text;
}

export function showDialog(id) {
  let dialog = document.querySelector(`dialog[data-from="${id}"]`);
  if (!dialog) {
    dialog = document.getElementById(id).content.firstElementChild.cloneNode(true);
    dialog.dataset.from = id;
    document.body.append(dialog);
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
    });
    const single = dialog.querySelector("[data-keys-switch]");
    if (single) {
      single.checked = keysOn();
      single.addEventListener("change", () => { try { localStorage.setItem("bartleby-keys", single.checked ? "on" : "off"); } catch { /* as it is */ } });
    }
  }
  if (!dialog.open) {
    const before = document.activeElement;
    dialog.addEventListener("close", () => before?.focus?.(), { once: true });
    dialog.showModal();
  }
  return dialog;
}

export function keysOn() {
  try { return localStorage.getItem("bartleby-keys") !== "off"; } catch { return true; }
}
