// Before anything is painted: the theme that somebody chose, else the one of the system.
(() => {
  try {
    const chosen = localStorage.getItem("bartleby-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage may be forbidden; then the system decides */ }
})();
