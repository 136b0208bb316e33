"""Report of one or more runs as one HTML page, made from the files of their run directories."""
