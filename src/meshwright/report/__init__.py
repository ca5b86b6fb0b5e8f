"""Reports of predictions: text for a terminal, one offline HTML file, and why two predictions differ."""
