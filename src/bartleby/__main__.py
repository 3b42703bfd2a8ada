"""`python -m bartleby` is `bartleby`."""

from bartleby.surfaces.cli import main

main()
