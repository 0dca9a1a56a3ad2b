//! Matrices as they come through terminals, browsers, logs and spreadsheets: every machine of tests/cases, in forms
//! that public issues and pages show, reads as it was printed.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

mod common;

use std::path::Path;

use common::tables::{Form, Table, print, table};
use common::{case_text, sections};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, Host, NumaId};
use gdrd_topology::read_text;

fn host(text: &str) -> Host {
    read_text(text, Path::new("paste"), &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}\n{text}")).host
}

fn cases() -> Vec<(String, Table)> {
    sections(&case_text("topo-m.tables")).into_iter().map(|(name, lines)| (name.to_owned(), table(&lines))).collect()
}

/// Asserts that a form of every case has the devices, levels and, `with_numa`, the nodes of the case.
fn assert_reads_as_printed(form: impl Fn(&Table, &str) -> String, with_numa: bool) {
    for (name, table) in cases() {
        let printed = print(&table, Form::default());
        let (right, text) = (host(&printed), form(&table, &printed));
        let read = host(&text);
        let names = |host: &Host| host.hcas.iter().map(|hca| hca.name.clone()).collect::<Vec<_>>();
        let levels = |host: &Host| {
            host.given_levels.iter().map(|given| (given.a.clone(), given.b.clone(), given.level)).collect::<Vec<_>>()
        };
        assert_eq!(names(&read), names(&right), "{name}\n{text}");
        assert_eq!(levels(&read), levels(&right), "{name}\n{text}");
        if with_numa {
            let numa = |host: &Host| host.gpus.iter().map(|gpu| gpu.numa).collect::<Vec<_>>();
            assert_eq!(numa(&read), numa(&right), "{name}\n{text}");
        }
    }
}

fn each_line(text: &str, form: impl Fn(&str) -> String) -> String {
    text.lines().map(|line| form(line) + "\n").collect()
}

/// sgl-project/sglang, vllm-project/vllm#13855 and NVIDIA/nccl#820: a terminal that wraps at a tab stop drops the blanks
/// of the tab, and copying joins the cells on both sides, in the header too.
#[test]
fn cells_run_together_where_a_terminal_wrapped() {
    for place in [3, 8, 9] {
        let join = |columns: usize, line: &str| {
            let mut cells: Vec<&str> = line.split('\t').collect();
            let joined = format!("{}{}", cells.get(place).unwrap_or(&""), cells.get(place + 1).unwrap_or(&""));
            if cells.len() <= place + 1 || place + 1 > columns {
                return line.to_owned();
            }
            cells[place] = &joined;
            cells.remove(place + 1);
            cells.join("\t")
        };
        assert_reads_as_printed(|table, text| each_line(text, |line| join(table.columns.len(), line)), true);
    }
}

#[test]
fn what_stands_before_a_row_may_be_anything() {
    for before in [
        "[rank0]: ",
        "Mar 01 10:00:00 node1 topo[123]: ",
        "INFO 03-01 10:00:00 [topo.py:12] ",
        "(EngineCore_0 pid=12) INFO ",
        "worker-0  | 2026-03-01T10:00:00Z stdout F ",
        "    12\t",
    ] {
        assert_reads_as_printed(|_, text| each_line(text, |line| format!("{before}{line}")), true);
    }
}

#[test]
fn web_pages_and_tables_are_read() {
    assert_reads_as_printed(
        |_, text| format!("<pre><code>{}</code></pre>", text.replace(' ', "&nbsp;").replace('\t', "&#9;")),
        true,
    );
    let row = |line: &str| format!("<tr><td>{}</td></tr>", line.replace('\t', "</td><td class=\"c\">"));
    assert_reads_as_printed(|_, text| each_line(text, row), true);
    let on_one_line = |text: &str| format!("<table>{}</table>", each_line(text, row).replace('\n', ""));
    assert_reads_as_printed(|_, text| on_one_line(text), true);
    let a_cell_a_line = |text: &str| on_one_line(text).replace("</td>", "</td>\n").replace("<td", "  <td");
    assert_reads_as_printed(|_, text| a_cell_a_line(text), true);
    for end in ["<br>", "<br/>", "<br />\n", "<BR>\n"] {
        let lines = |text: &str| text.replace('\t', "&nbsp;&#9;").replace('\n', end);
        assert_reads_as_printed(|_, text| lines(text), true);
    }
    assert_reads_as_printed(|_, text| each_line(text, |line| format!("│ {} │", line.replace('\t', " │ "))), false);
    assert_reads_as_printed(|_, text| each_line(text, |line| line.replace('\t', "^I") + "$"), true);
}

#[test]
fn comma_separated_values_and_strings_are_read() {
    for sign in [",", ";"] {
        assert_reads_as_printed(|_, text| each_line(text, |line| line.replace(" X ", "X").replace('\t', sign)), true);
        let quoted = |line: &str| format!("\"{}\"", line.replace('\t', &format!("\"{sign}\"")));
        assert_reads_as_printed(|_, text| each_line(text, quoted), true);
    }
    let quoted = |line: &str| format!("\"{}\"", line.replace('\t', "\"\t\""));
    assert_reads_as_printed(|_, text| each_line(text, quoted), true);
    let string = |text: &str| format!("{{\"topo\": \"{}\"}}\n", text.replace('\n', "\\n").replace('\t', "\\t"));
    assert_reads_as_printed(|_, text| string(text), true);
    let cell = |text: &str| format!("| topology | {} |\n", text.replace('\n', "<br>"));
    assert_reads_as_printed(|_, text| cell(text), true);
}

/// `stdout_lines` of Ansible, lists of Python, `- '…'` of YAML.
#[test]
fn lists_of_lines_are_read() {
    let list = |text: &str, begin: &str, between: &str, end: &str| {
        let lines: Vec<String> = text.lines().map(|line| line.replace('\t', "\\t")).collect();
        format!("{begin}{}{end}", lines.join(between))
    };
    for (begin, between, end) in [
        ("ok: [host] => {\n  \"topo.stdout_lines\": [\n    \"", "\",\n    \"", "\"\n  ]\n}\n"),
        ("{\"stdout_lines\": [\"", "\", \"", "\"]}"),
        ("[\"", "\",\"", "\"]\n"),
        ("['", "', '", "']\n"),
    ] {
        assert_reads_as_printed(|_, text| list(text, begin, between, end), true);
    }
    assert_reads_as_printed(|_, text| each_line(text, |line| format!("  - '{line}'")), true);
    assert_reads_as_printed(
        |_, text| each_line(text, |line| format!("    \"{}\",", line.replace('\t', "      "))),
        false,
    );
}

#[test]
fn what_grep_and_diff_put_before_each_line_goes() {
    for before in ["topo.txt:", "+", "/tmp/a-1.txt:"] {
        assert_reads_as_printed(|_, text| each_line(text, |line| format!("{before}{line}")), true);
    }
    for file in ["", "topo.txt:"] {
        let number = |(at, line): (usize, &str)| format!("{file}{}:{line}\n", at + 9);
        assert_reads_as_printed(|_, text| text.lines().enumerate().map(number).collect(), true);
    }
}

#[test]
fn small_letters_and_other_signs_for_x_are_read() {
    let small = |text: &str| {
        let (matrix, legend) = text.split_once("NIC Legend").unwrap();
        format!("{}\nNIC Legend{}", matrix.to_lowercase(), legend.replace("NIC", "nic"))
    };
    assert_reads_as_printed(|_, text| small(text), true);
    assert_reads_as_printed(|_, text| text.replace(" X ", " ✕ "), true);
}

/// Public notes print the columns of the GPUs alone and the rows of the NICs below; ALCF documents retype a NIC as `HSN`.
#[test]
fn nics_that_have_a_row_alone_or_a_name_without_number_are_read() {
    let rows = host(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV8\t0-31\t0\nGPU1\tNV8\t X \t32-63\t1\nNIC0\tPIX\tSYS\n",
    );
    let nic = rows.find_hca("NIC0").unwrap();
    assert_eq!(rows.gpu_hca_level(GpuId(0), nic), Some(Level::Pix));
    assert_eq!(rows.gpu_hca_level(GpuId(1), nic), Some(Level::Sys));
    let named = host(
        "| | GPU0 | GPU1 | HSN | CPU Affinity | NUMA Affinity |\n+--+--+--+--+--+--+\n| GPU0 | X | NV12 | SYS | 48-63 | 3 |\n\
         | GPU1 | NV12 | X | NODE | 32-47 | 2 |\n| HSN | SYS | NODE | X | | |\n",
    );
    assert_eq!(named.gpu_hca_level(GpuId(1), named.find_hca("HSN").unwrap()), Some(Level::Node));
    assert_eq!(named.gpus[0].numa, Some(NumaId(3)));
}
