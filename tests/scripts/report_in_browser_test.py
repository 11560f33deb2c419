"""The report page in headless Chromium: no console error, and the figures that the browser holds are the files'.

    python3 report_in_browser_test.py [PICTURE.png]

Exit status 77 where there is no Chromium (Debian: apt-get install chromium)."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHES = (file for file in (ROOT / "docs" / "data").glob("*/*.json") if json.loads(file.read_text())["schema"] == "latent-moe/bench/1")
FILES = sorted(BENCHES, key=lambda file: -file.stat().st_size)  # the largest is what a picture shows


def main():
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print("no Chromium here: the page is only parsed (tests/python/test_report.py)")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, ROOT / "python" / "latent_moe" / "report.py", *FILES, "-o", page], check=True)
        picture = Path(sys.argv[1] if len(sys.argv) > 1 else Path(folder) / "report.png").resolve()

        def browse(*what):
            return subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
                                   f"--user-data-dir={folder}/profile", *what, page.as_uri()], capture_output=True, text=True, timeout=300)

        shown = browse("--dump-dom")
        drawn = browse("--window-size=1180,1750", f"--screenshot={picture}")
        for done in (shown, drawn):
            said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
            assert done.returncode == 0 and not said, said or done.stderr
        assert picture.stat().st_size > 20_000, "the picture is empty"
        values = {float(value) for value in re.findall(r'data-value="([^"]+)"', shown.stdout)}
        rows = [row for file in FILES for row in json.loads(file.read_text())["rows"]]
        missing = [row for row in rows if row["median_us"] not in values or row["ratio_to_floor"] not in values]
        assert rows and not missing, missing[:3]
        # What the page's script answers to a click on every name, in a copy of it.
        text = page.read_text(encoding="utf-8")
        clicks = "<script>for (const b of document.querySelectorAll('.legend button')) b.click();</script></body>"
        page.write_text(text.replace("</body>", clicks), encoding="utf-8")
        clicked = browse("--dump-dom")
        assert 'aria-pressed="true"' not in clicked.stdout and clicked.stdout.count("display: none") >= text.count("<g data-series"), "no line hid"
    print(f"{len(rows)} rows shown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
