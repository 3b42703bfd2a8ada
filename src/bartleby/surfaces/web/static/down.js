// While the database is away: look every few seconds whether it is back, and then show the page that was asked for.
setInterval(async () => {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.status !== 503) location.reload();
  } catch { /* the console itself is away; the next look may find it */ }
}, 3000);
