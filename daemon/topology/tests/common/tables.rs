//! The matrices of tests/cases/topo-m.tables, and how people paste them.

/// A matrix of tests/cases/topo-m.tables.
pub(crate) struct Table {
    pub(crate) columns: Vec<String>,
    pub(crate) first_nic: usize,
    pub(crate) nics: Vec<String>,
    pub(crate) rows: Vec<TableRow>,
}

pub(crate) struct TableRow {
    pub(crate) name: String,
    pub(crate) cpus: String,
    pub(crate) numa: String,
    pub(crate) cells: Vec<String>,
}

pub(crate) fn table(lines: &[&str]) -> Table {
    let mut table = Table { columns: Vec::new(), first_nic: 0, nics: Vec::new(), rows: Vec::new() };
    for line in lines.iter().filter(|line| !line.is_empty()) {
        if let Some(gpus) = line.strip_prefix("gpus ") {
            table.columns = (0..gpus.parse().unwrap()).map(|gpu: usize| format!("GPU{gpu}")).collect();
        } else if let Some(number) = line.strip_prefix("first NIC ") {
            table.first_nic = number.parse().unwrap();
        } else if let Some(nics) = line.strip_prefix("nics ") {
            table.nics = nics.split(' ').map(str::to_owned).collect();
            table.columns.extend((table.first_nic..).take(table.nics.len()).map(|nic| format!("NIC{nic}")));
        } else {
            table.rows.push(row(line));
        }
    }
    table
}

/// `GPU0 cpus=0-63 numa=0: X NV12*7 SYS*2`.
pub(crate) fn row(line: &str) -> TableRow {
    let (head, cells) = line.split_once(": ").unwrap();
    let mut words = head.split(' ');
    let name = words.next().unwrap().to_owned();
    let mut key = |name: &str| words.next().and_then(|word| word.strip_prefix(name)).unwrap_or("").to_owned();
    let (cpus, numa) = (key("cpus="), key("numa="));
    let many = |word: &str| {
        let (cell, count) = word.split_once('*').unwrap_or((word, "1"));
        vec![cell.to_owned(); count.parse().unwrap()]
    };
    TableRow { name, cpus, numa, cells: cells.split(' ').flat_map(many).collect() }
}

/// How a matrix is printed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Form {
    /// Underlined header, as on a terminal.
    pub(crate) ansi: bool,
    /// Blanks for tabs, as many editors and chats make of them.
    pub(crate) spaces: bool,
    pub(crate) gpu_rows_only: bool,
    /// NIC columns and rows by device name, as before the legend came in.
    pub(crate) device_names: bool,
    /// Broken into lines of this many cells.
    pub(crate) wrapped: Option<usize>,
    /// Prompt, quoting and prose around it.
    pub(crate) surrounded: bool,
    /// Bars of a Markdown table.
    pub(crate) bars: bool,
}

pub(crate) fn print(table: &Table, form: Form) -> String {
    let name = |column: &str| match column.strip_prefix("NIC").and_then(|nic| nic.parse::<usize>().ok()) {
        Some(nic) if form.device_names => table.nics[nic - table.first_nic].clone(),
        _ => column.to_owned(),
    };
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut header = vec![String::new()];
    header.extend(table.columns.iter().map(|column| name(column)));
    header.extend(["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"].map(str::to_owned));
    lines.push(header);
    for row in table.rows.iter().filter(|row| !form.gpu_rows_only || row.name.starts_with("GPU")) {
        let mut cells = vec![name(&row.name)];
        cells.extend(row.cells.iter().map(|cell| if cell == "X" { " X ".to_owned() } else { cell.clone() }));
        if row.name.starts_with("GPU") {
            // The tool itself puts two tabs before the last column.
            cells.extend([row.cpus.clone(), row.numa.clone(), String::new(), "N/A".to_owned()]);
        }
        lines.push(cells);
    }
    let separator = if form.spaces {
        "    "
    } else if form.bars {
        " | "
    } else {
        "\t"
    };
    let mut out = Vec::new();
    for (at, cells) in lines.iter().enumerate() {
        let width = form.wrapped.unwrap_or(cells.len());
        for part in cells.chunks(width) {
            let line = part.join(separator);
            out.push(match (form.ansi && at == 0, form.bars) {
                (true, _) => format!("\u{1b}[4m{line}\u{1b}[0m"),
                (_, true) => format!("| {line} |"),
                _ => line,
            });
        }
        if form.bars && at == 0 {
            out.push(format!("|{}", "---|".repeat(cells.len())));
        }
    }
    if !form.device_names {
        out.extend(["".to_owned(), "NIC Legend:".to_owned(), String::new()]);
        out.extend((table.first_nic..).zip(&table.nics).map(|(nic, name)| format!("  NIC{nic}: {name}")));
    }
    if form.surrounded { surround(&out) } else { out.join("\n") }
}

pub(crate) fn surround(lines: &[String]) -> String {
    let legend = "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between \
                  NUMA nodes (e.g., QPI/UPI)\n  PIX  = Connection traversing at most a single PCIe bridge\n  NV#  = \
                  Connection traversing a bonded set of # NVLinks\n";
    let quoted: Vec<String> = lines.iter().map(|line| format!("12:00:01.5 [pod/a] > {line}")).collect();
    format!(
        "Hi, here is what GPU0 sees with mlx5_0:\r\nNIC0 NODE only\r\n# GPU1 SYS to both\r\nuser@host:~$ nvidia-smi topo -m\r\n{}\r\n\n{legend}\nuser@host:~$ \
         # GPU0 GPU1 look fine\n",
        quoted.join("\r\n")
    )
}

pub(crate) const FORMS: [(&str, Form); 9] = {
    let plain = Form {
        ansi: false,
        spaces: false,
        gpu_rows_only: false,
        device_names: false,
        wrapped: None,
        surrounded: false,
        bars: false,
    };
    [
        ("plain", plain),
        ("ansi", Form { ansi: true, ..plain }),
        ("spaces", Form { spaces: true, ..plain }),
        ("gpu rows only", Form { gpu_rows_only: true, ..plain }),
        ("device names", Form { device_names: true, ..plain }),
        ("wrapped", Form { wrapped: Some(7), ..plain }),
        ("surrounded", Form { surrounded: true, ansi: true, ..plain }),
        ("bars", Form { bars: true, ..plain }),
        ("old and quoted", Form { device_names: true, surrounded: true, gpu_rows_only: true, spaces: true, ..plain }),
    ]
};
