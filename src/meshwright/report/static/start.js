// Start: theme first, then everything that is drawn.
"use strict";

Meshwright.theme.start();
Meshwright.enliven(document);
