"""The verbs that start jobs on other machines and look after them."""

from paceline.cli.options import count, make_parser


def meet(arguments: list[str]) -> int:
    """Keep the list of a job's machines."""
    parser = make_parser("meet", "--port PORT", "Keep the meeting place of jobs whose machines leave and join.")
    parser.add_argument("--port", type=count, required=True)
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.base.meet import serve

    serve(options.port)
    return 0
