"""studies/cpu/public_text.py: the text of a CNXML module, by the rules that the study's text was
made with. All 3,925 modules of the 23 books were compared with it once, at the commits of
repositories.json."""

import pytest

from studies.cpu.public_text import flatten

MATHML = "<m:math><m:mrow><m:mi>x</m:mi>\n  <m:mo>+</m:mo></m:mrow><m:mn>1</m:mn></m:math>"


def text_of(body: str) -> str:
    namespaces = (
        'xmlns="http://cnx.rice.edu/cnxml" xmlns:m="http://www.w3.org/1998/Math/MathML"'
        ' xmlns:md="http://cnx.rice.edu/mdml"'
    )
    return flatten(f"<document {namespaces}>{body}</document>".encode())


@pytest.mark.parametrize(
    "body, text",
    [
        ("<para>one\n  two</para><para>three</para>", "one two\n\nthree"),
        ("<title>Title</title><list><item>a</item>\n<item>b</item></list>", "Title\n\na\n\nb"),
        ("<row><entry>1 </entry><entry>2</entry></row>", "1\n\n2"),
        ("<list>a</list>b<example>c</example>d", "a\n\nbc\n\nd"),
        ("<row>a</row>b<glossary>c</glossary>d", "a\n\nbc\n\nd"),
        # at the ends of a line they are left out
        ("<para>\u00a0 a \u00a0</para>", "a"),
        ("<equation>\na\nb\n</equation>", "a\nb"),
        # no-break spaces and spaces of other widths stay within a line
        ("<para>7.91\u00a0\u00d7\u2003or</para>", "7.91\u00a0\u00d7\u2003or"),
        # outside a line only tabs become spaces
        ("<section>one  two\tthree</section>", "one  two three"),
        ("<term>gas\n law\n</term>\n<meaning>relation</meaning>", "gas law\nrelation"),
        ("<term>index</term>  <meaning>number</meaning>", "index  number"),
        ("<metadata><md:title>no</md:title></metadata><para>yes</para>", "yes"),
        ("<para>see<media><para>no</para></media> it</para>", "see it"),
    ],
)
def test_an_element_becomes_lines_of_text(body: str, text: str) -> None:
    assert text_of(body) == text


def test_mathml_becomes_its_characters_with_single_spaces() -> None:
    assert text_of(f"<para>where {MATHML} holds</para>") == "where x + 1 holds"


def test_an_equation_follows_without_a_space_and_ends_a_part() -> None:
    assert text_of(f"<para>equal:<equation>\n{MATHML}\n</equation>so</para>") == "equal:x + 1 so"


@pytest.mark.parametrize("kind", ["note", "quote", "figure"])
def test_a_note_a_quote_and_a_figure_end_no_line(kind: str) -> None:
    assert text_of(f"<para>one.<{kind}>two</{kind}>three</para>") == "one.twothree"
